// y = x * weight^T with packed weights. A unit of work is a few panels and a block of rows.
#pragma once

#include "elementwise.h"
#include "kernels.h"
#include "lora.h"
#include "simd.h"
#include "thread_pool.h"
#include "tile.h"

namespace llm::LLM_ISA {

// Inputs of one pass over the rows. Four panels of a pass (32 KB as multiplied) stay in the first-level cache; with AMX
// tiles, for which storing and loading sums costs as much as four steps, two panels of twice as many inputs. If
// products are fast, the next four panels must fit as well (16 KB each). With enough tiles to read panels one by one,
// they are read into the second-level cache, which holds longer passes, so sums are stored and loaded less often. With
// AVX2, a panel of a pass (16 KB) and the activations of a tile stay in the first-level cache.
template <class Element>
constexpr size_t pass_inputs(size_t rows) {
  constexpr size_t kInput = 4 * kPanelWidth * sizeof(ActivationOf<Element>);
  if (kMultipliesTiles<Element>) return 2 * 32768 / kInput;
  if (LLM_AVX2_ONLY) return 16384 / (kPanelWidth * sizeof(Element));
  if (!Operand<Element>::kQuick) return 32768 / kInput;
  return (rows > (kTilePanels - 1) * kTileRows ? 131072 : 16384) / kInput;
}

// Most rows of a unit of work: few enough that their sums and the inputs of a pass stay in the second-level cache and
// each thread has several units, but enough that unpacking panels pays. Products by AMX tiles prefetch the inputs of
// the next pass, which must fit as well.
template <class Element>
constexpr size_t kMaxRows = kMultipliesTiles<Element> ? 256
                            : LLM_AVX2_ONLY           ? 128
                                                      : 512;
constexpr size_t kMinRows = 96;
constexpr size_t kUnitsPerThread = 6;
// If all inputs of the rows of a unit take at most this many bytes, they stay in the second-level cache between passes,
// so they are not prefetched.
constexpr size_t kCachedRowBytes = 512 * 1024;
static_assert(kMaxPassWidth % pass_inputs<BFloat16>(1) == 0 && kMaxPassWidth % pass_inputs<BFloat16>(4096) == 0);

// Most panels of a unit of work: few enough that threads end together, and fewer if the next pass is read meanwhile.
// Every unit reads all activations of its rows again, mostly from the last-level cache, which matters for fast AMX
// products, and for tiles of a single panel.
template <class Element>
constexpr size_t unit_panels(size_t rows) {
  if (kMultipliesTiles<Element>) return kMaxPanels;
  return spreads_prefetches<Element>(rows) && !LLM_AVX2_ONLY ? kTilePanels : 8;
}

// Distance of the prefetches in a panel that is read beside others; 1-2 KB hides the latency of memory.
constexpr size_t kBytesAhead = LLM_AVX2_ONLY ? 2048 : 1024;

// Few rows of fast products are multiplied by one panel after the other, so that each thread reads a single stream of
// memory: up to 1.2 times as fast as several panels side by side, on Zen 5. This is the distance of its prefetches.
constexpr size_t kBytesAheadOfStream = 4096;
// The same for panels of blocks (packed_blocks.h), where it is up to 1.25 times as fast as 4096, on Zen 4.
constexpr size_t kBytesAheadOfBlocks = 8192;

template <class Element>
constexpr bool is_stream(size_t rows) {
  return Operand<Element>::kQuick && !spreads_prefetches<Element>(rows);
}

// Form of x in the product: a multiple of Operand::kMultiple inputs, padded with zeros.
template <class Element>
struct ActivationForm {
  size_t inputs, pass;
  TiledLayout layout;
  bool converts;  // x is of another type, or too narrow

  ActivationForm(size_t m, size_t k) : inputs(TiledLayout::padded(k, Operand<Element>::kMultiple)) {
    constexpr bool kTiles = kMultipliesTiles<Element>;
    const size_t most = spreads_prefetches<Element>(m) ? pass_inputs<Element>(m) : inputs;
    pass = inputs <= most ? inputs : most;
    // A single row is read without conversion. The prefetched rows of a tile follow those of the previous tile. Whole
    // rows are often a multiple of 4 KB apart, so that the rows of a pass would share few sets of a cache.
    const bool in_place = kTiles ? m == 1 : !Operand<Element>::kQuick && !(LLM_AVX2_ONLY && pass < inputs);
    layout = {m, in_place ? inputs : pass, kTiles && !in_place ? kTileBytes / sizeof(ActivationOf<Element>) : 0};
    converts = sizeof(ActivationOf<Element>) != sizeof(Element) || inputs != k;
  }

  // Bytes of all rows: partial tiles and the last pass take as much as whole ones.
  size_t bytes(size_t m) const {
    if (inputs == 0) return 0;
    const size_t tile = layout.tile > 0 ? layout.tile : 1;
    const size_t rows = layout.tile > 0 ? TiledLayout::padded(m, kTileHeight) : m;
    const size_t columns = TiledLayout::padded(TiledLayout::padded(inputs, layout.width), tile);
    return rows * columns * sizeof(ActivationOf<Element>);
  }
};

template <class Element>
struct Activations : ActivationForm<Element> {
  using Packed = Element;      // the type of panels in memory
  using Multiplied = Element;  // the type in which panels are multiplied; it decides the size of units

  const ActivationOf<Element>* data;

  Activations(const ActivationForm<Element>& form, const void* data)
      : ActivationForm<Element>(form), data(static_cast<const ActivationOf<Element>*>(data)) {}

  const ActivationOf<Element>* at(size_t row, size_t k) const { return data + this->layout.at(row, k); }
};

// Calls convert(row) for every row of x, on one thread if that is faster than waking another.
template <class Convert>
void for_rows_of_x(const LinearArgs& args, Convert convert) {
  auto convert_range = [&](size_t first, size_t last) {
    for (size_t row = first; row < last; row++) convert(row);
  };
  if (args.m * args.k < 65536) {
    convert_range(0, args.m);
  } else {
    for_row_ranges(args.m, args.k, convert_range);
  }
}

template <class Element>
Activations<Element> prepare_activations(const LinearArgs& args, const ActivationForm<Element>& form) {
  using Activation = ActivationOf<Element>;
  const TiledLayout& layout = form.layout;
  const TiledLayout given = args.x_layout.or_rows(args.m, args.k);
  if (!form.converts && given.width == layout.width && given.tile == layout.tile) {
    return {form, args.x};
  }
  auto* data = static_cast<Activation*>(scratch(Scratch::kActivations, form.bytes(args.m) + 1));
  for_rows_of_x(args, [&](size_t row) {
    const Element* x = static_cast<const Element*>(args.x) + row * given.width;
    // No run begins behind the columns of x: only the last one has padding, shorter than a run.
    layout.for_runs(row, 0, form.inputs, [&](size_t first, size_t last, size_t at) {
      const size_t end = last < args.k ? last : args.k;
      to_activations(x + first, end - first, data + at);
      for (size_t i = end; i < last; i++) data[at + i - first] = Activation{};
    });
  });
  return {form, data};
}

// Calls body(at, packed_at, count) for elements that are adjacent both in a packed panel and in one of 16 columns and a
// multiple of kInputs inputs.
template <class Element, class Body>
void for_panel_runs(const LinearArgs& args, size_t panel, Body body) {
  constexpr size_t kInputs = Operand<Element>::kInputs;
  const size_t left = args.n - panel * kPanelWidth;
  const size_t width = left < kPanelWidth ? left : kPanelWidth;
  const size_t paired = args.k / kInputs * kInputs;
  for (size_t k = 0; k < paired; k += kInputs) body(k * kPanelWidth, k * width, width * kInputs);
  for (size_t column = 0; paired < args.k && column < width; column++) {
    body(paired * kPanelWidth + column * kInputs, paired * width + column, 1);
  }
}

// Returns a panel of 16 columns and `inputs` inputs, padded with zeros if the packed one is smaller.
template <class Element>
const Element* whole_panel(const LinearArgs& args, size_t panel, size_t inputs, Element* padded) {
  const size_t first = panel * kPanelWidth;
  const Element* packed = static_cast<const Element*>(args.weight) + first * args.k;
  if (args.n - first >= kPanelWidth && inputs == args.k) return packed;
  __builtin_memset(static_cast<void*>(padded), 0, inputs * kPanelWidth * sizeof(Element));
  for_panel_runs<Element>(args, panel, [&](size_t at, size_t packed_at, size_t count) {
    __builtin_memcpy(static_cast<void*>(padded + at), packed + packed_at, count * sizeof(Element));
  });
  return padded;
}

// From this number of rows on, whole lines of a result are written past the caches without reading them first.
constexpr size_t kStreamedRows = 64;

// Columns of the weight for one column of y.
inline size_t halves(const LinearArgs& args) { return args.gate == Gate::kNone ? 1 : 2; }

// Division of y into units: blocks of rows times groups of panels. The division does not affect any element.
struct Units {
  size_t rows, row_blocks;
  size_t panels, panel_groups;  // panels of columns of y
  size_t all_panels;

  Units(const LinearArgs& args, size_t max_panels, size_t max_rows)
      : all_panels((args.n + kPanelWidth - 1) / kPanelWidth / halves(args)) {
    const size_t m = args.m;
    auto of_half = [&](size_t count) { return count < halves(args) ? 1 : count / halves(args); };
    const size_t min_panels = of_half(m < kTileRows ? kTilePanels : 2);
    const size_t wanted = kUnitsPerThread * num_threads();
    panels = of_half(max_panels);
    set(m, (m + max_rows - 1) / max_rows);
    while (count() < wanted && rows >= 2 * kMinRows) set(m, 2 * row_blocks);
    while (count() < wanted && panels > min_panels) {
      panels /= 2;
      set(m, row_blocks);
    }
  }

  size_t count() const { return row_blocks * panel_groups; }

 private:
  void set(size_t m, size_t blocks) {
    rows = ((m + blocks - 1) / blocks + kRowMultiple - 1) / kRowMultiple * kRowMultiple;
    row_blocks = (m + rows - 1) / rows;
    panel_groups = (all_panels + panels - 1) / panels;
  }
};

// The whole panels of a unit: a few columns of y, or those of both halves for a gated y.
template <class Element>
struct UnitPanels {
  size_t first, each;  // columns of y, in panels
  size_t count;
  size_t index[kMaxPanels];         // indices in the weight
  const Element* data[kMaxPanels];  // each with `inputs` inputs
  size_t inputs;
  // Distance to the unit that this thread is likely to process next; 0: none.
  size_t following = 0;

  UnitPanels(const LinearArgs& args, const Units& units, size_t unit, size_t all_inputs) : inputs(all_inputs) {
    first = unit % units.panel_groups * units.panels;
    each = units.all_panels - first < units.panels ? units.all_panels - first : units.panels;
    count = halves(args) * each;
    auto* padded = static_cast<Element*>(scratch(Scratch::kPanel, count * kPanelWidth * inputs * sizeof(Element) + 1));
    for (size_t p = 0; p < count; p++) {
      index[p] = p / each * units.all_panels + first + p % each;
      data[p] = whole_panel(args, index[p], inputs, padded + p * kPanelWidth * inputs);
    }
    const bool whole = (first + 2 * each) * kPanelWidth <= args.n / halves(args) && inputs == args.k;
    if (whole) following = each * kPanelWidth * inputs;
  }
};

// The panels of one pass over `inputs` inputs from `k` on, and what is prefetched meanwhile.
template <class Element>
struct PassPanels {
  const Element* now[kMaxPanels];
  const Element* next[kMaxPanels];

  // `spreads`: prefetch the next pass, or the first pass of the following unit; otherwise prefetch what the same tile
  // reads a little later.
  template <class Packed>
  PassPanels(const UnitPanels<Packed>& panels, size_t k, size_t inputs, bool spreads,
             size_t bytes_ahead = kBytesAhead) {
    const bool ends = k + inputs == panels.inputs && panels.following > 0;
    for (size_t p = 0; p < panels.count; p++) {
      const auto* data = reinterpret_cast<const Element*>(panels.data[p]);
      now[p] = data + k * kPanelWidth;
      const Element* after = ends ? data + panels.following : now[p] + inputs * kPanelWidth;
      next[p] = spreads ? after : now[p] + bytes_ahead / sizeof(Element);
    }
  }
};

// Computes the sums [count][rows][16] of a block of rows with the panels of a unit, in passes over the inputs.
template <class Element>
void add_products(const Activations<Element>& x, size_t row, size_t rows, const UnitPanels<Element>& panels,
                  float* sums) {
  if (x.inputs == 0) __builtin_memset(sums, 0, panels.count * rows * kPanelWidth * sizeof(float));
  for (size_t k = 0; k < x.inputs; k += x.pass) {
    const size_t inputs = x.inputs - k < x.pass ? x.inputs - k : x.pass;
    const size_t ahead = is_stream<Element>(rows) ? kBytesAheadOfStream : kBytesAhead;
    const PassPanels<Element> pass(panels, k, inputs, spreads_prefetches<Element>(rows), ahead);
    Product<Element> product(rows, x.at(row, k), pass.now, panels.count, inputs, sums);
    if (is_stream<Element>(rows)) product.panels_at_once = 1;
    product.a_stride = x.layout.width;
    product.a_tile = x.layout.tile;
    product.add_to_c = k > 0;
    product.next = pass.next;
    const bool stays = rows * x.inputs * sizeof(*x.data) <= kCachedRowBytes;
    product.a_next = stays ? nullptr : x.at(row, k + inputs < x.inputs ? k + inputs : 0);
    multiply(product);
  }
}

template <class Element>
void sum_products(const LinearArgs&, const Activations<Element>& x, size_t row, size_t rows,
                  const UnitPanels<Element>& panels, float* sums) {
  add_products(x, row, rows, panels, sums);
}

// Computes sixteen columns of a row from their sums, with the operations that follow the product.
template <class Element>
LLM_INLINE Floats finish(const LinearArgs& args, const float* sums, size_t row, size_t column) {
  Floats value = load(sums);
  const size_t left = args.n - column;
  if (args.bias != nullptr) {
    value = rounded<Element>(value) + load_first(static_cast<const Element*>(args.bias) + column, left);
  }
  if (args.residual != nullptr) {
    const size_t stride = args.residual_stride > 0 ? args.residual_stride : args.n;
    const Element* residual = static_cast<const Element*>(args.residual) + row * stride + column;
    value = rounded<Element>(value) * broadcast(args.scale) + load_first(residual, left);
  }
  return value;
}

// Writes a unit's rows of y.
template <class Element, class Result, Gate kGate, class Packed>
void write_rows(const LinearArgs& args, size_t row, size_t rows, const UnitPanels<Packed>& panels, const float* sums) {
  const size_t all_columns = args.n / halves(args);
  const size_t column = panels.first * kPanelWidth;
  const size_t width = panels.each * kPanelWidth;
  const size_t columns = all_columns - column < width ? all_columns - column : width;
  auto value = [&](size_t r, size_t i) {
    const float* from = sums + i * rows + r * kPanelWidth;
    const Floats first = finish<Element>(args, from, row + r, column + i);
    if constexpr (kGate == Gate::kNone) return first;
    const Floats second = finish<Element>(args, from + width * rows, row + r, all_columns + column + i);
    return gate_times<kGate>(rounded<Element>(first), rounded<Element>(second));
  };
  const TiledLayout layout = args.y_layout.or_rows(args.m, all_columns);
  auto* y = static_cast<Result*>(args.y) + layout.at(row, column);
#if defined(__AVX512BF16__) || defined(LLM_AMX)
  if constexpr (std::is_same<Result, BFloat16>::value) {
    constexpr size_t kLine = 2 * kLanes;
    const bool whole = columns % kLine == 0 && layout.width % kLine == 0 && reinterpret_cast<uintptr_t>(y) % 64 == 0;
    if (rows >= kStreamedRows && whole) {
      for (size_t r = 0; r < rows; r++) {
        Result* target = y + layout.row_offset(r);
        for (size_t i = 0; i < columns; i += kLine) {
          stream_line(target + layout.column_offset(i), value(r, i), value(r, i + kLanes));
        }
      }
      return _mm_sfence();
    }
  }
#endif
  for (size_t r = 0; r < rows; r++) {
    Result* target = y + layout.row_offset(r);
    for (size_t i = 0; i < columns; i += kLanes) {
      store_first(target + layout.column_offset(i), value(r, i), columns - i);
    }
  }
}

// x is converted by `Prepared`, for a weight with panels of Prepared::Packed.
template <class Element, class Result, class Prepared>
void linear_unit(const LinearArgs& args, const Prepared& x, const Units& units, size_t unit) {
  const UnitPanels<typename Prepared::Packed> panels(args, units, unit, x.inputs);
  const size_t row = unit / units.panel_groups * units.rows;
  const size_t rows = args.m - row < units.rows ? args.m - row : units.rows;
  const size_t size = panels.count * rows * kPanelWidth * sizeof(float);
  auto* sums = static_cast<float*>(scratch(Scratch::kTile, size));
  sum_products(args, x, row, rows, panels, sums);
  if constexpr (std::is_same<Element, Result>::value) {
    if (args.adapters != nullptr) add_changes<Element>(args, row, rows, panels.index, panels.count, sums);
    switch (args.gate) {
      case Gate::kSilu:
        return write_rows<Element, Result, Gate::kSilu>(args, row, rows, panels, sums);
      case Gate::kGeluTanh:
        return write_rows<Element, Result, Gate::kGeluTanh>(args, row, rows, panels, sums);
      case Gate::kGelu:
        return write_rows<Element, Result, Gate::kGelu>(args, row, rows, panels, sums);
      case Gate::kClamped:
        return write_rows<Element, Result, Gate::kClamped>(args, row, rows, panels, sums);
      case Gate::kNone:
      case Gate::kTanh:
        break;
    }
  }
  write_rows<Element, Result, Gate::kNone>(args, row, rows, panels, sums);
}

template <class Element, class Result, class Prepared>
void linear_into(const LinearArgs& args, const Prepared& x) {
  using Multiplied = typename Prepared::Multiplied;
  const Units units(args, unit_panels<Multiplied>(args.m), kMaxRows<Multiplied>);
  auto body = [&](size_t i) { linear_unit<Element, Result>(args, x, units, i); };
  parallel_for(units.count(), body);
}

template <class Element, class Prepared>
void linear_with(const LinearArgs& args, const Prepared& x) {
  // Sums of qvalues are copied as they are: 32 bits of either type.
  if (args.y_dtype == DType::kFloat32 || args.y_dtype == DType::kInt32) {
    linear_into<Element, float>(args, x);
  } else {
    linear_into<Element, Element>(args, x);
  }
}

inline void linear(const LinearArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    linear_with<Element>(args, prepare_activations<Element>(args, ActivationForm<Element>(args.m, args.k)));
  });
}

}  // namespace llm::LLM_ISA

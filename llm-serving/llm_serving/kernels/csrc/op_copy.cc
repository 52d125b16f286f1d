// Gather, SplitWithSize, StridedSlice, Transpose, Reshape and MoveTo: operators that only copy.
#include <algorithm>
#include <vector>

#include "parts.h"
#include "thread_pool.h"

namespace llm {
namespace {

// Smaller copies are done by one thread, which is faster than waking another.
constexpr size_t kBytesPerTask = 65536;

template <class Body>
void for_copies(size_t count, size_t bytes_each, Body body) {
  const size_t each = bytes_each >= kBytesPerTask ? 1 : kBytesPerTask / (bytes_each + 1) + 1;
  auto task = [&](size_t i) {
    for (size_t j = i * each; j < (i + 1) * each && j < count; j++) body(j);
  };
  parallel_for((count + each - 1) / each, task);
}

int gather_rows(const Call& call, int table, int indices, char* y, size_t y_stride, size_t first, size_t whole) {
  const size_t rows = call.dim(table, 0);
  const char* data = call.data<const char>(table);
  const PackedWeight weight(data, call.dtype(table), rows, call.dim(table, 1));
  const size_t columns = weight.columns();
  const size_t bytes =
      columns * (weight.is_packed() ? element_size(weight.dtype(), nullptr) : call.element_bytes(table));
  if (y_stride == 0) y_stride = bytes;
  if (const int status = check_indices(call, indices, whole == 0 ? rows : whole)) return status;
  for_copies(call.elements(indices), bytes, [&](size_t i) {
    // those before the first become larger than all
    const size_t row = static_cast<size_t>(call.integer(indices, i)) - first;
    if (row >= rows) {
      std::memset(y + i * y_stride, 0, bytes);
    } else if (weight.is_packed()) {
      weight.unpack_row(row, y + i * y_stride);
    } else {
      std::memcpy(y + i * y_stride, data + row * bytes, bytes);
    }
  });
  return 0;
}

// Copies the qvalues of rows of a packed 8-bit table.
int gather_qvalues(const Call& call, const PackedWeight& table, int indices, int8_t* y) {
  const size_t columns = table.columns();
  if (const int status = check_indices(call, indices, call.dim(0, 0))) return status;
  for_copies(call.elements(indices), columns, [&](size_t i) {
    const size_t row = static_cast<size_t>(call.integer(indices, i));
    read_qvalues(*table.qvalues(), table.dtype(), call.data<void>(0), columns, row, y + i * columns);
  });
  return 0;
}

}  // namespace

int check_indices(const Call& call, int indices, size_t rows) {
  if (!call.is_integer(indices)) return call.fail("indices must be int32 or int64");
  for (size_t i = 0; i < call.elements(indices); i++) {
    const int64_t index = call.integer(indices, i);
    if (index < 0 || static_cast<size_t>(index) >= rows) {
      return call.fail("index %lld is outside the %zu rows of the table", static_cast<long long>(index), rows);
    }
  }
  return 0;
}

int gather_blocks(const Call& call, int table, int indices, char* y, size_t y_stride, size_t first, size_t whole) {
  static OperatorClock clock("Gather");
  const Timed timed(clock);
  return gather_rows(call, table, indices, y, y_stride, first, whole);
}

}  // namespace llm

// table, indices, axis, batch_dims | y; rows of a packed table are unpacked, to qvalues if y has qvalues
LLM_OPERATOR(Gather) {
  using namespace llm;
  if (call.count() < 5) return call.fail("expects 5 parameters, got %d", call.count());
  if (call.integer(3) != 0) return call.fail("batch_dims must be 0");
  const int64_t given = call.integer(2);
  const int axis = static_cast<int>(given < 0 ? given + call.rank(0) : given);
  if (axis < 0 || axis >= call.rank(0)) return call.fail("axis %lld is out of range", static_cast<long long>(given));
  const size_t bytes = call.element_bytes(0);
  if (bytes == 0) return call.fail("the type of the table is not supported");
  if (axis == 0 && call.rank(0) == 2 && call.dtype(4) == DType::kInt8) {
    const PackedWeight weight(call.data<void>(0), call.dtype(0), call.dim(0, 0), call.dim(0, 1));
    if (is_quantized(weight.qvalues()) && weight.qvalues()->format != WeightFormat::kBlocks &&
        weight.qvalues()->bits == 8) {
      return gather_qvalues(call, weight, 1, call.data<int8_t>(4));
    }
  }
  if (axis == 0 && call.rank(0) == 2) return gather_rows(call, 0, 1, call.data<char>(4), 0, 0, 0);
  size_t outer = 1;
  size_t inner = bytes;
  for (int i = 0; i < axis; i++) outer *= call.dim(0, i);
  for (int i = axis + 1; i < call.rank(0); i++) inner *= call.dim(0, i);
  const size_t rows = call.dim(0, axis);
  if (const int status = check_indices(call, 1, rows)) return status;
  const char* table = call.data<const char>(0);
  const bool is_matrix = call.rank(0) == 2;
  if (is_matrix && PackedWeight(table, call.dtype(0), call.dim(0, 0), call.dim(0, 1)).is_packed()) {
    return call.fail("a packed weight is gathered by rows only");
  }
  char* y = call.data<char>(4);
  const size_t count = call.elements(1);
  for_copies(outer * count, inner, [&](size_t i) {
    const size_t row = static_cast<size_t>(call.integer(1, i % count));
    std::memcpy(y + i * inner, table + (i / count * rows + row) * inner, inner);
  });
  return 0;
}

// x, order of its axes | y. MindSpore has no kernel for it in bfloat16.
LLM_OPERATOR(Transpose) {
  using namespace llm;
  if (call.count() < 3) return call.fail("expects 3 parameters, got %d", call.count());
  const int rank = call.rank(0);
  if (call.elements(1) != static_cast<size_t>(rank)) return call.fail("the order must have %d axes", rank);
  std::vector<int> order;
  for (int i = 0; i < rank; i++) {
    const int64_t axis = call.integer(1, static_cast<size_t>(i));
    order.push_back(static_cast<int>(axis < 0 ? axis + rank : axis));
    if (order[i] < 0 || order[i] >= rank || std::count(order.begin(), order.end(), order[i]) > 1) {
      return call.fail("the order must have each axis once");
    }
  }
  // Trailing axes that keep their places are copied as a whole.
  size_t inner = call.element_bytes(0);
  if (inner == 0) return call.fail("the type of x is not supported");
  if (call.elements(2) != call.elements(0) || call.element_bytes(2) != inner) {
    return call.fail("y must have as many elements as x, of its type");
  }
  int outer = rank;
  for (; outer > 0 && order[outer - 1] == outer - 1; outer--) inner *= call.dim(0, outer - 1);
  std::vector<size_t> strides(rank, 1);
  for (int i = outer - 2; i >= 0; i--) strides[i] = strides[i + 1] * call.dim(0, i + 1);
  size_t count = 1;
  for (int i = 0; i < outer; i++) count *= call.dim(0, i);
  const char* x = call.data<const char>(0);
  char* y = call.data<char>(2);
  for_copies(count, inner, [&](size_t i) {
    size_t from = 0, rest = i;
    for (int axis = outer - 1; axis >= 0; axis--) {
      const size_t size = call.dim(0, order[axis]);
      from += rest % size * strides[order[axis]];
      rest /= size;
    }
    std::memcpy(y + i * inner, x + from * inner, inner);
  });
  return 0;
}

// x, sizes, axis | one output for each size
LLM_OPERATOR(SplitWithSize) {
  using namespace llm;
  if (call.count() < 4) return call.fail("expects at least 4 parameters, got %d", call.count());
  const int64_t given = call.integer(2);
  const int axis = static_cast<int>(given < 0 ? given + call.rank(0) : given);
  if (axis < 0 || axis >= call.rank(0)) return call.fail("axis %lld is out of range", static_cast<long long>(given));
  const size_t bytes = call.element_bytes(0);
  if (bytes == 0) return call.fail("the type of the input is not supported");
  const size_t parts = call.elements(1);
  if (static_cast<size_t>(call.count()) < 3 + parts) return call.fail("has fewer outputs than sizes");
  size_t outer = 1;
  size_t inner = bytes;
  for (int i = 0; i < axis; i++) outer *= call.dim(0, i);
  for (int i = axis + 1; i < call.rank(0); i++) inner *= call.dim(0, i);
  size_t total = 0;
  for (size_t part = 0; part < parts; part++) {
    const int64_t size = call.integer(1, part);
    const int y = 3 + static_cast<int>(part);
    if (size < 0 || call.elements(y) * bytes != outer * static_cast<size_t>(size) * inner) {
      return call.fail("size %lld of part %zu does not fit its output", static_cast<long long>(size), part);
    }
    total += static_cast<size_t>(size);
  }
  const size_t row = call.dim(0, axis) * inner;
  if (total * inner != row) return call.fail("sizes add up to %zu of %zu", total, call.dim(0, axis));
  for_copies(outer, row, [&](size_t i) {
    const char* x = call.data<const char>(0) + i * row;
    for (size_t part = 0; part < parts; part++) {
      const size_t width = static_cast<size_t>(call.integer(1, part)) * inner;
      std::memcpy(call.data<char>(3 + static_cast<int>(part)) + i * width, x, width);
      x += width;
    }
  });
  return 0;
}

namespace llm {
namespace {

// Indices of an axis that a slice selects.
struct Range {
  int64_t first, step;
  size_t count;
};

// Reads entry `number` of begin, end and step, parameters 1 to 3, for an axis of `size`; masks are parameters from 4
// on.
Range range_of(const Call& call, size_t number, size_t size) {
  const int64_t length = static_cast<int64_t>(size), furthest = std::max(length, int64_t{1});
  // any larger step selects one index as well
  const int64_t step = std::clamp(call.integer(3, number), -furthest, furthest);
  auto is_set = [&](int mask) { return (call.integer(mask) >> number & 1) != 0; };
  auto from_start = [&](int64_t index) { return index < 0 ? index + length : index; };
  if (is_set(8)) return {from_start(call.integer(1, number)), 1, 1};  // one index, and the axis is removed
  const int64_t least = step > 0 ? 0 : -1, most = step > 0 ? length : length - 1;
  auto within = [&](int64_t index) { return index < least ? least : index > most ? most : index; };
  const int64_t begin = is_set(4) ? (step > 0 ? least : most) : within(from_start(call.integer(1, number)));
  const int64_t end = is_set(5) ? (step > 0 ? most : least) : within(from_start(call.integer(2, number)));
  const int64_t span = step > 0 ? end - begin : begin - end, stride = step > 0 ? step : -step;
  return {begin, step, span <= 0 ? 0 : static_cast<size_t>((span + stride - 1) / stride)};
}

// Reads one range for each axis of x; returns a status as operators do.
int read_ranges(const Call& call, std::vector<Range>& ranges) {
  const size_t given = call.elements(1), rank = static_cast<size_t>(call.rank(0));
  if (call.elements(2) != given || call.elements(3) != given)
    return call.fail("begin, end and strides must be as many");
  const int64_t ellipsis = call.integer(6), residual = call.integer(7);
  size_t taken = 0;  // axes of x with an entry of their own
  for (size_t number = 0; number < given; number++) taken += ((ellipsis | residual) >> number & 1) == 0;
  if (taken > rank) return call.fail("%zu ranges are given for %zu axes", taken, rank);
  auto take_whole = [&](size_t count) {
    for (; count > 0; count--) ranges.push_back({0, 1, call.dim(0, static_cast<int>(ranges.size()))});
  };
  for (size_t number = 0; number < given; number++) {
    if ((ellipsis >> number & 1) != 0) {
      take_whole(rank - taken);
      taken = rank;  // the ellipsis stands for all axes without an entry
    } else if ((residual >> number & 1) == 0) {
      const size_t size = call.dim(0, static_cast<int>(ranges.size()));
      if (call.integer(3, number) == 0) return call.fail("strides must not be 0");
      ranges.push_back(range_of(call, number, size));
      const Range& range = ranges.back();
      if (range.count > 0 && (range.first < 0 || range.first >= static_cast<int64_t>(size))) {
        return call.fail("index %lld is outside an axis of %zu", static_cast<long long>(range.first), size);
      }
    }
  }
  take_whole(rank - ranges.size());
  return 0;
}

// Copies the slice for all axes from `axis` on, and returns the end of the copy.
char* copy_slice(const std::vector<Range>& ranges, const std::vector<size_t>& bytes, size_t axis, const char* x,
                 char* y) {
  if (axis == ranges.size()) {
    std::memcpy(y, x, bytes[axis]);
    return y + bytes[axis];
  }
  const Range& range = ranges[axis];
  x += range.first * static_cast<int64_t>(bytes[axis + 1]);
  if (axis + 1 == ranges.size() && range.step == 1) {
    std::memcpy(y, x, range.count * bytes[axis + 1]);
    return y + range.count * bytes[axis + 1];
  }
  for (size_t i = 0; i < range.count; i++, x += range.step * static_cast<int64_t>(bytes[axis + 1])) {
    y = copy_slice(ranges, bytes, axis + 1, x, y);
  }
  return y;
}

}  // namespace
}  // namespace llm

// x, begin, end, strides, and masks of begin, end, ellipsis, new axes and removed axes | y
LLM_OPERATOR(StridedSlice) {
  using namespace llm;
  if (call.count() < 10) return call.fail("expects 10 parameters, got %d", call.count());
  std::vector<Range> ranges;
  if (const int status = read_ranges(call, ranges)) return status;
  // bytes of an index of each axis, and of an element
  std::vector<size_t> bytes(ranges.size() + 1, call.element_bytes(0));
  size_t count = 1;
  for (size_t axis = ranges.size(); axis-- > 0;) {
    bytes[axis] = bytes[axis + 1] * call.dim(0, static_cast<int>(axis));
    count *= ranges[axis].count;
  }
  if (bytes.back() == 0) return call.fail("the type of the input is not supported");
  if (count != call.elements(9)) return call.fail("the slice has %zu elements, not %zu", count, call.elements(9));
  if (count > 0) copy_slice(ranges, bytes, 0, call.data<const char>(0), call.data<char>(9));
  return 0;
}

namespace llm {
namespace {

// Copies the first parameter to the last, which has as many elements.
int copy(const Call& call) {
  const int y = call.count() - 1;
  const size_t bytes = y < 1 ? 0 : call.element_bytes(0);
  if (bytes == 0 || call.elements(y) != call.elements(0) || call.element_bytes(y) != bytes) {
    return call.fail("the result must be like the input");
  }
  if (call.data<void>(y) == call.data<void>(0)) return 0;
  std::memcpy(call.data<void>(y), call.data<void>(0), call.elements(0) * bytes);
  return 0;
}

}  // namespace
}  // namespace llm

// x, shape | y; MindSpore has no Reshape of bfloat16 on a CPU
LLM_OPERATOR(Reshape) { return llm::copy(call); }

// x, device, whether to wait | y; all memory is host memory
LLM_OPERATOR(MoveTo) { return llm::copy(call); }

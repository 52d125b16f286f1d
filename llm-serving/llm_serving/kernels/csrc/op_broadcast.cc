// AddExt, Add, Mul and Greater of any shapes that broadcast and of any numeric type, SiLU and Sigmoid.
//
// MindSpore uses an operator that this library registers for every call, so each must support all that MindSpore's own
// does, except complex numbers; MindSpore has none for bfloat16 on a CPU.
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "call.h"
#include "kernels.h"

namespace llm {
namespace {

// Inputs a and b are parameters 0 and 1.
struct Binary {
  int y;
  bool multiplies;  // y = a * b; otherwise y = a + alpha * b
  double alpha;
  int64_t of_integers;  // alpha for integers, exactly
};

// An input of the result's rows, which are `stride` elements apart; 0 if all rows are the same.
struct Operand {
  const char* data;
  size_t stride;
};

size_t columns_of(const Call& call, int i) { return call.rank(i) == 0 ? 1 : call.dim(i, -1); }

// Whether every axis of input `i`, counted from the last, is as long as that of the result, or 1.
bool broadcasts(const Call& call, int i, int y) {
  if (call.rank(i) > call.rank(y)) return false;
  for (int axis = 1; axis <= call.rank(i); axis++) {
    if (call.dim(i, -axis) != 1 && call.dim(i, -axis) != call.dim(y, -axis)) return false;
  }
  return true;
}

// Copies input `i`, repeating its axes as in the result.
void repeat(const Call& call, int i, int y, size_t bytes, char* target) {
  std::vector<size_t> steps(static_cast<size_t>(call.rank(y)), 0);  // elements of `i` from one index to the next
  size_t step = 1;
  for (int axis = 1; axis <= call.rank(i); axis++) {
    if (call.dim(i, -axis) != 1) steps[static_cast<size_t>(call.rank(y) - axis)] = step;
    step *= call.dim(i, -axis);
  }
  std::vector<size_t> index(steps.size(), 0);
  size_t at = 0;
  for (size_t left = call.elements(y); left > 0; left--, target += bytes) {
    std::memcpy(target, call.data<const char>(i) + at * bytes, bytes);
    for (size_t axis = index.size(); axis-- > 0;) {
      at += steps[axis];
      if (++index[axis] < call.dim(y, static_cast<int>(axis))) break;
      at -= index[axis] * steps[axis];
      index[axis] = 0;
    }
  }
}

Operand operand(const Call& call, int i, int y, size_t bytes, std::vector<char>& room) {
  const char* data = call.data<const char>(i);
  const size_t columns = columns_of(call, y);
  const size_t count = call.elements(i);
  if (count == call.elements(y)) return {data, columns};
  if (count == columns && columns_of(call, i) == columns) return {data, 0};
  if (count == 1) {
    room.resize(columns * bytes);
    for (size_t column = 0; column < columns; column++) std::memcpy(room.data() + column * bytes, data, bytes);
    return {room.data(), 0};
  }
  room.resize(call.elements(y) * bytes);
  repeat(call, i, y, bytes, room.data());
  return {room.data(), columns};
}

template <class Number>
Number combine(Number a, Number b, const Binary& binary) {
  if constexpr (std::is_same_v<Number, bool>) {
    return binary.multiplies ? a && b : a || (b && binary.of_integers != 0);
  } else if constexpr (std::is_integral_v<Number>) {  // overflow wraps
    using Wide = uint64_t;
    const Wide product =
        static_cast<Wide>(b) * (binary.multiplies ? static_cast<Wide>(a) : static_cast<Wide>(binary.of_integers));
    return static_cast<Number>(binary.multiplies ? product : static_cast<Wide>(a) + product);
  } else {
    return binary.multiplies ? a * b : a + static_cast<Number>(binary.alpha) * b;
  }
}

template <class Number>
void combine_all(const Operand& a, const Operand& b, const Binary& binary, size_t rows, size_t columns, void* result) {
  const Number* left = reinterpret_cast<const Number*>(a.data);
  const Number* right = reinterpret_cast<const Number*>(b.data);
  Number* y = static_cast<Number*>(result);
  for (size_t row = 0; row < rows; row++, left += a.stride, right += b.stride, y += columns) {
    for (size_t i = 0; i < columns; i++) y[i] = combine(left[i], right[i], binary);
  }
}

template <class Number>
void compare_all(const Operand& a, const Operand& b, size_t rows, size_t columns, bool* y) {
  const Number* left = reinterpret_cast<const Number*>(a.data);
  const Number* right = reinterpret_cast<const Number*>(b.data);
  for (size_t row = 0; row < rows; row++, left += a.stride, right += b.stride, y += columns) {
    for (size_t i = 0; i < columns; i++) y[i] = left[i] > right[i];
  }
}

struct NumberType {
  const char* name;
  void (*combine_all)(const Operand&, const Operand&, const Binary&, size_t, size_t, void*);
  void (*compare_all)(const Operand&, const Operand&, size_t, size_t, bool*);
};

template <class Number>
constexpr NumberType number_type(const char* name) {
  return {name, combine_all<Number>, compare_all<Number>};
}

constexpr NumberType kNumberTypes[] = {
    number_type<bool>("bool"),       number_type<int8_t>("int8"),     number_type<int16_t>("int16"),
    number_type<int32_t>("int32"),   number_type<int64_t>("int64"),   number_type<uint8_t>("uint8"),
    number_type<uint16_t>("uint16"), number_type<uint32_t>("uint32"), number_type<uint64_t>("uint64"),
    number_type<float>("float32"),   number_type<double>("float64"),
};

// Null for other types.
const NumberType* find_number_type(const char* name) {
  for (const NumberType& type : kNumberTypes) {
    if (std::strcmp(type.name, name) == 0) return &type;
  }
  return nullptr;
}

int compute(const Call& call, const Binary& binary) {
  const int y = binary.y;
  if (std::strcmp(call.dtype_name(0), call.dtype_name(1)) != 0 ||
      std::strcmp(call.dtype_name(0), call.dtype_name(y)) != 0) {
    return call.fail("inputs and result must be of one type, are %s, %s and %s", call.dtype_name(0), call.dtype_name(1),
                     call.dtype_name(y));
  }
  if (!broadcasts(call, 0, y) || !broadcasts(call, 1, y)) return call.fail("shapes do not broadcast to the result's");
  const size_t bytes = call.element_bytes(0);
  const size_t count = call.elements(y);
  if (count == 0) return 0;
  std::vector<char> room_of_a, room_of_b;
  const Operand a = operand(call, 0, y, bytes, room_of_a);
  const Operand b = operand(call, 1, y, bytes, room_of_b);
  const bool is_whole = a.stride != 0 && b.stride != 0;
  const size_t columns = is_whole ? count : columns_of(call, y);
  const size_t rows = count / columns;
  void* result = call.data<void>(y);
  if (is_float(call.dtype(y))) {
    const AddArgs args = {a.data, b.data,   result,   call.dtype(y), columns, static_cast<float>(binary.alpha),
                          rows,   a.stride, b.stride, columns};
    binary.multiplies ? kernels().multiply(args) : kernels().add(args);
    return 0;
  }
  const NumberType* type = find_number_type(call.dtype_name(y));
  if (type == nullptr) {
    return call.fail("%s is no type of numbers that is added or multiplied here", call.dtype_name(y));
  }
  type->combine_all(a, b, binary, rows, columns, result);
  return 0;
}

// Returns `given` in float32.
Operand weight_only(const Operand& given, DType dtype, size_t rows, size_t columns, std::vector<float>& room) {
  room.resize(given.stride == 0 ? columns : rows * columns);
  widen(given.data, room.size(), dtype, room.data());
  return {reinterpret_cast<const char*>(room.data()), given.stride};
}

// y = a > b
int compare(const Call& call, int y) {
  if (std::strcmp(call.dtype_name(0), call.dtype_name(1)) != 0 || call.dtype(y) != DType::kBool) {
    return call.fail("inputs must be of one type and the result bool, are %s, %s and %s", call.dtype_name(0),
                     call.dtype_name(1), call.dtype_name(y));
  }
  if (!broadcasts(call, 0, y) || !broadcasts(call, 1, y)) return call.fail("shapes do not broadcast to the result's");
  const bool is_short = is_float(call.dtype(0)) && call.dtype(0) != DType::kFloat32;
  const NumberType* type = find_number_type(is_short ? "float32" : call.dtype_name(0));
  if (type == nullptr) return call.fail("%s is no type of numbers that is compared here", call.dtype_name(0));
  if (call.elements(y) == 0) return 0;
  std::vector<char> room_of_a, room_of_b;
  Operand a = operand(call, 0, y, call.element_bytes(0), room_of_a);
  Operand b = operand(call, 1, y, call.element_bytes(0), room_of_b);
  const size_t columns = columns_of(call, y), rows = call.elements(y) / columns;
  std::vector<float> wide_a, wide_b;
  if (is_short) {
    a = weight_only(a, call.dtype(0), rows, columns, wide_a);
    b = weight_only(b, call.dtype(0), rows, columns, wide_b);
  }
  type->compare_all(a, b, rows, columns, call.data<bool>(y));
  return 0;
}

}  // namespace
}  // namespace llm

// a, b, alpha | a + alpha * b
LLM_OPERATOR(AddExt) {
  if (call.count() < 4) return call.fail("expects 4 parameters, got %d", call.count());
  if (call.is_integer(2)) return llm::compute(call, {3, false, static_cast<double>(call.integer(2)), call.integer(2)});
  if (call.dtype(2) != llm::DType::kFloat32) return call.fail("alpha must be an integer or a float32");
  return llm::compute(call, {3, false, call.number(2), static_cast<int64_t>(call.number(2))});
}

// a, b | a + b
LLM_OPERATOR(Add) {
  if (call.count() < 3) return call.fail("expects 3 parameters, got %d", call.count());
  return llm::compute(call, {2, false, 1.0, 1});
}

// a, b | a * b
LLM_OPERATOR(Mul) {
  if (call.count() < 3) return call.fail("expects 3 parameters, got %d", call.count());
  return llm::compute(call, {2, true, 1.0, 1});
}

// a, b | a > b
LLM_OPERATOR(Greater) {
  if (call.count() < 3) return call.fail("expects 3 parameters, got %d", call.count());
  return llm::compare(call, 2);
}

namespace llm {
namespace {

int map(const Call& call, void (*function)(const SigmoidArgs&)) {
  if (!is_float(call.dtype(0)) || call.dtype(1) != call.dtype(0) || call.elements(1) != call.elements(0)) {
    return call.fail("x and the result must be floats of one type and shape");
  }
  function({call.data<void>(0), call.data<void>(1), call.dtype(0), call.elements(0)});
  return 0;
}

}  // namespace
}  // namespace llm

// x | x * sigmoid(x)
LLM_OPERATOR(SiLU) {
  if (call.count() < 2) return call.fail("expects 2 parameters, got %d", call.count());
  return llm::map(call, llm::kernels().silu);
}

// x | sigmoid(x)
LLM_OPERATOR(Sigmoid) {
  if (call.count() < 2) return call.fail("expects 2 parameters, got %d", call.count());
  const auto is_double = [&](int i) { return std::strcmp(call.dtype_name(i), "float64") == 0; };
  if (!is_double(0) || !is_double(1) || call.elements(1) != call.elements(0)) {
    return llm::map(call, llm::kernels().sigmoid);
  }
  for (size_t i = 0; i < call.elements(0); i++)
    call.data<double>(1)[i] = 1 / (1 + std::exp(-call.data<const double>(0)[i]));
  return 0;
}

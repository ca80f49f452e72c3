#include "lockstep/data/hdf5/element.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace lockstep::data::hdf5 {

namespace {

// Calls f.template operator()<T>() for the C++ type of `element`.
template <typename F>
auto Visit(Element element, F f) {
  switch (element) {
    case Element::kUint8:
      return f.template operator()<uint8_t>();
    case Element::kInt8:
      return f.template operator()<int8_t>();
    case Element::kUint16:
      return f.template operator()<uint16_t>();
    case Element::kInt16:
      return f.template operator()<int16_t>();
    case Element::kUint32:
      return f.template operator()<uint32_t>();
    case Element::kInt32:
      return f.template operator()<int32_t>();
    case Element::kUint64:
      return f.template operator()<uint64_t>();
    case Element::kInt64:
      return f.template operator()<int64_t>();
    case Element::kFloat16:
      return f.template operator()<c10::Half>();
    case Element::kFloat32:
      return f.template operator()<float>();
    case Element::kFloat64:
      return f.template operator()<double>();
  }
  std::abort();
}

template <typename T>
constexpr bool kFloating = !std::is_integral_v<T>;

}  // namespace

template <typename From, typename To>
int64_t Convert(const uint8_t* from, void* to, int64_t count, const Conversion& how) {
  const From* in = reinterpret_cast<const From*>(from);
  To* out = static_cast<To*>(to);
  if constexpr (kFloating<To>) {
    // Float32 is exact for what is converted to smaller types; float64 needs its own.
    using Wide = std::conditional_t<std::is_same_v<To, double>, double, float>;
    const Wide divide_by = static_cast<Wide>(how.divide_by_);
    if (std::is_same_v<From, To> && how.divide_by_ == 1) {
      std::memcpy(to, from, count * sizeof(To));
    } else if (how.divide_by_ == 1) {
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<To>(static_cast<Wide>(in[i]));
    } else {
      for (int64_t i = 0; i < count; ++i) {
        out[i] = static_cast<To>(static_cast<Wide>(in[i]) / divide_by);
      }
    }
  } else if constexpr (!kFloating<From>) {
    if (how.checked_) {
      for (int64_t i = 0; i < count; ++i) {
        const From value = in[i];
        if (std::is_unsigned_v<From> && sizeof(From) == 8
                ? static_cast<uint64_t>(value) > static_cast<uint64_t>(how.high_)
                : static_cast<int64_t>(value) < how.low_ ||
                      static_cast<int64_t>(value) > how.high_) {
          return i;
        }
      }
    }
    if (std::is_same_v<From, To>) {
      std::memcpy(to, from, count * sizeof(To));
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<To>(in[i]);
    }
  }
  return -1;
}

int64_t BytesOf(Element element) {
  return Visit(element, []<typename T>() -> int64_t { return sizeof(T); });
}

bool IsInteger(Element element) {
  return Visit(element, []<typename T>() { return !kFloating<T>; });
}

std::string NameOf(Element element) {
  static constexpr const char* kNames[] = {"uint8",   "int8",    "uint16", "int16",
                                           "uint32",  "int32",   "uint64", "int64",
                                           "float16", "float32", "float64"};
  return kNames[static_cast<int>(element)];
}

std::string NameOf(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return "uint8";
    case at::kChar:
      return "int8";
    case at::kShort:
      return "int16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kHalf:
      return "float16";
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kBool:
      return "bool";
    case at::kBFloat16:
      return "bfloat16";
    default:
      return c10::toString(type);
  }
}

at::ScalarType NaturalType(Element element) {
  switch (element) {
    case Element::kUint8:
      return at::kByte;
    case Element::kInt8:
      return at::kChar;
    case Element::kInt16:
      return at::kShort;
    case Element::kUint16:
    case Element::kInt32:
      return at::kInt;
    case Element::kUint32:
    case Element::kUint64:
    case Element::kInt64:
      return at::kLong;
    case Element::kFloat16:
      return at::kHalf;
    case Element::kFloat32:
      return at::kFloat;
    case Element::kFloat64:
      return at::kDouble;
  }
  std::abort();
}

absl::StatusOr<Conversion> Conversion::Make(Element from, at::ScalarType to, double divide_by,
                                            std::optional<int64_t> classes) {
  Conversion how;
  how.from_ = from;
  how.divide_by_ = divide_by;
  std::string wrong;
  if (!std::isfinite(divide_by) || divide_by == 0) {
    wrong = absl::StrCat("divide_by is ", divide_by, ", by which nothing can be divided");
  }
  const auto to_type = [&]<typename To>() {
    Visit(from, [&]<typename From>() {
      how.function_ = Convert<From, To>;
      how.copies_ = std::is_same_v<From, To> && divide_by == 1;
      if constexpr (kFloating<To>) {
        if (classes) wrong = "labels in classes are integers, and dtype is not an integer type";
      } else if constexpr (kFloating<From>) {
        wrong = absl::StrCat("holds ", NameOf(from), ", which ", NameOf(to),
                             " cannot; ask for a floating-point dtype");
      } else {
        using Limits = std::numeric_limits<To>;
        how.low_ = static_cast<int64_t>(Limits::min());
        how.high_ = static_cast<int64_t>(Limits::max());
        how.checked_ = std::cmp_less(std::numeric_limits<From>::min(), how.low_) ||
                       std::cmp_greater(std::numeric_limits<From>::max(), how.high_);
        if (classes) {
          if (*classes < 1 || *classes - 1 > how.high_) {
            wrong = absl::StrCat(*classes, " classes are not for ", NameOf(to));
          }
          how.low_ = 0;
          how.high_ = *classes - 1;
          how.checked_ = true;
        }
        if (divide_by != 1) {
          wrong = absl::StrCat("divide_by needs a floating-point dtype, not ", NameOf(to));
        }
      }
    });
  };
  switch (to) {
    case at::kByte:
      to_type.operator()<uint8_t>();
      break;
    case at::kChar:
      to_type.operator()<int8_t>();
      break;
    case at::kShort:
      to_type.operator()<int16_t>();
      break;
    case at::kInt:
      to_type.operator()<int32_t>();
      break;
    case at::kLong:
      to_type.operator()<int64_t>();
      break;
    case at::kHalf:
      to_type.operator()<c10::Half>();
      break;
    case at::kFloat:
      to_type.operator()<float>();
      break;
    case at::kDouble:
      to_type.operator()<double>();
      break;
    case at::kBFloat16:
      to_type.operator()<c10::BFloat16>();
      break;
    case at::kBool:
      to_type.operator()<uint8_t>();
      if (wrong.empty()) {
        how.high_ = 1;
        how.checked_ = true;
      }
      break;
    default:
      wrong = absl::StrCat("dtype ", NameOf(to), " is not one of those that can be read");
  }
  if (!wrong.empty()) return absl::InvalidArgumentError(wrong);
  how.copies_ = how.copies_ && !how.checked_;
  return how;
}

std::string Conversion::Complaint(const uint8_t* from) const {
  return Visit(from_, [&]<typename From>() {
    From value;
    std::memcpy(&value, from, sizeof(value));
    std::string text;
    if constexpr (!kFloating<From>) text = absl::StrCat(+value);
    return absl::StrCat(text, ", but must be from ", low_, " to ", high_);
  });
}

}  // namespace lockstep::data::hdf5

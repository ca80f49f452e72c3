#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace lockstep::data::hdf5 {

// What a value is in memory after it was read, in the machine's byte order.
enum class Element {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kUint64,
  kInt64,
  kFloat16,
  kFloat32,
  kFloat64,
};

int64_t BytesOf(Element element);
bool IsInteger(Element element);
std::string NameOf(Element element);  // as NumPy writes it: "uint8"
std::string NameOf(at::ScalarType type);

// The type in which LibTorch holds all values of `element`; int64 for uint64, most of whose values
// it holds.
at::ScalarType NaturalType(Element element);

// How rows become those of a batch.
class Conversion {
 public:
  // INVALID_ARGUMENT for a type that is none of uint8, int8, int16, int32, int64, bool, float16,
  // bfloat16, float32 and float64, for floating-point values as integers, and for a division or
  // classes that make no sense with these types.
  static absl::StatusOr<Conversion> Make(Element from, at::ScalarType to, double divide_by,
                                         std::optional<int64_t> classes);

  // Converts `count` values. Returns -1, or the first of them that the type or the classes do not
  // allow.
  int64_t operator()(const uint8_t* from, void* to, int64_t count) const {
    return function_(from, to, count, *this);
  }

  // Whether rows are copied as they are.
  bool copies() const { return copies_; }

  // The value at `from`, and what it should have been: "12, but must be from 0 to 9".
  std::string Complaint(const uint8_t* from) const;

 private:
  template <typename From, typename To>
  friend int64_t Convert(const uint8_t* from, void* to, int64_t count, const Conversion& how);

  using Function = int64_t (*)(const uint8_t*, void*, int64_t, const Conversion&);

  Function function_ = nullptr;
  Element from_ = Element::kUint8;
  double divide_by_ = 1;
  int64_t low_ = 0;  // of integers: values outside [low, high] are refused
  int64_t high_ = 0;
  bool checked_ = false;  // whether there can be such values
  bool copies_ = false;
};

}  // namespace lockstep::data::hdf5

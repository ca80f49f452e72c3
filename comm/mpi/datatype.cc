#include "lockstep/comm/mpi/datatype.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

namespace lockstep::comm::mpi {
namespace {

struct Sum {
  static float Apply(float a, float b) { return a + b; }
};
struct Min {
  static float Apply(float a, float b) { return std::min(a, b); }
};
struct Max {
  static float Apply(float a, float b) { return std::max(a, b); }
};
struct Product {
  static float Apply(float a, float b) { return a * b; }
};

template <typename T, typename Function>
void Combine(void* in, void* in_out, int* count, MPI_Datatype*) {
  const T* from = static_cast<const T*>(in);
  T* to = static_cast<T*>(in_out);
  for (int i = 0; i < *count; ++i) {
    to[i] = static_cast<T>(Function::Apply(static_cast<float>(from[i]), static_cast<float>(to[i])));
  }
}

MPI_Op MakeOp(MPI_User_function* function) {
  MPI_Op op = MPI_OP_NULL;
  MPI_Op_create(function, /*commute=*/1, &op);
  return op;
}

// The type and operations of one half-precision dtype; they live as long as MPI.
template <typename T>
struct Half {
  Half() {
    MPI_Type_contiguous(sizeof(T), MPI_BYTE, &type);
    MPI_Type_commit(&type);
  }

  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op sum = MakeOp(Combine<T, Sum>);
  MPI_Op min = MakeOp(Combine<T, Min>);
  MPI_Op max = MakeOp(Combine<T, Max>);
  MPI_Op product = MakeOp(Combine<T, Product>);

  MPI_Op Get(ReduceOp op) const {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAverage:
        return sum;
      case ReduceOp::kMin:
        return min;
      case ReduceOp::kMax:
        return max;
      case ReduceOp::kProduct:
        return product;
    }
    return MPI_OP_NULL;
  }
};

template <typename T>
const Half<T>& TheHalf() {
  static const Half<T> half;
  return half;
}

template <typename T>
void DivideAs(void* data, int64_t count, int divisor) {
  T* values = static_cast<T*>(data);
  if constexpr (sizeof(T) == 2) {
    const float by = static_cast<float>(divisor);
    for (int64_t i = 0; i < count; ++i)
      values[i] = static_cast<T>(static_cast<float>(values[i]) / by);
  } else {
    const T by = static_cast<T>(divisor);
    for (int64_t i = 0; i < count; ++i) values[i] /= by;
  }
}

}  // namespace

MPI_Datatype DatatypeOf(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return MPI_FLOAT;
    case at::kDouble:
      return MPI_DOUBLE;
    case at::kHalf:
      return TheHalf<c10::Half>().type;
    case at::kBFloat16:
      return TheHalf<c10::BFloat16>().type;
    case at::kInt:
      return MPI_INT32_T;
    case at::kLong:
      return MPI_INT64_T;
    case at::kByte:
      return MPI_UINT8_T;
    default:
      return MPI_DATATYPE_NULL;  // Validate() has refused it
  }
}

MPI_Op OpOf(ReduceOp op, at::ScalarType dtype) {
  if (dtype == at::kHalf) return TheHalf<c10::Half>().Get(op);
  if (dtype == at::kBFloat16) return TheHalf<c10::BFloat16>().Get(op);
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return MPI_SUM;
    case ReduceOp::kMin:
      return MPI_MIN;
    case ReduceOp::kMax:
      return MPI_MAX;
    case ReduceOp::kProduct:
      return MPI_PROD;
  }
  return MPI_OP_NULL;
}

void Divide(void* data, int64_t count, at::ScalarType dtype, int divisor) {
  switch (dtype) {
    case at::kFloat:
      return DivideAs<float>(data, count, divisor);
    case at::kDouble:
      return DivideAs<double>(data, count, divisor);
    case at::kHalf:
      return DivideAs<c10::Half>(data, count, divisor);
    case at::kBFloat16:
      return DivideAs<c10::BFloat16>(data, count, divisor);
    default:
      break;  // Validate() has refused it
  }
}

}  // namespace lockstep::comm::mpi

#pragma once

namespace lockstep::comm {

// How AllReduce and ReduceScatterInto combine the ranks' elements.
//
// kAverage is the sum divided by the number of ranks, for floating-point dtypes only.
// Half-precision dtypes (f16, bf16) are combined in f32 and rounded when the result is stored.
enum class ReduceOp { kSum, kAverage, kMin, kMax, kProduct };

// "sum", "average", "min", "max" or "product".
const char* Name(ReduceOp op);

}  // namespace lockstep::comm

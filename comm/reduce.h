#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "lockstep/comm/reduce_op.h"

namespace lockstep::comm {

// For backends that combine ranks' elements themselves: writes into output[0, count) the
// combination of inputs[i][0, count), in the order of i; f16 and bf16 in f32. `output` may be one
// of the inputs.
void Reduce(void* output, const std::vector<const void*>& inputs, int64_t count,
            at::ScalarType dtype, ReduceOp op);

}  // namespace lockstep::comm

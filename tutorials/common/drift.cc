#include "lockstep/tutorials/common/drift.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include "lockstep/comm/reduce_op.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::tutorials {

double Drift(const std::vector<at::Tensor>& weights, comm::Communicator& world) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flat;
  for (const at::Tensor& weight : weights) flat.push_back(weight.flatten());
  const at::Tensor largest = at::cat(flat);
  const at::Tensor smallest = largest.clone();
  ThrowIfError(world.AllReduce(largest, comm::ReduceOp::kMax).Wait());
  ThrowIfError(world.AllReduce(smallest, comm::ReduceOp::kMin).Wait());
  const auto difference = largest.sub(smallest).norm().item<double>();
  if (difference == 0) return 0;  // whatever the weights are
  return 100 * difference / largest.add(smallest).div(/*other=*/2).norm().item<double>();
}

}  // namespace lockstep::tutorials

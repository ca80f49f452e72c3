#include "lockstep/tutorials/common/evaluate.h"

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "lockstep/comm/reduce_op.h"
#include "lockstep/data/batch.h"

namespace lockstep::tutorials {

constexpr int64_t kRowsAtOnce = 100;

absl::StatusOr<Evaluation> Evaluate(const models::Classifier& model,
                                    const std::shared_ptr<data::Dataset>& dataset,
                                    comm::Communicator& world) {
  const at::NoGradGuard no_grad;
  at::Tensor sums = at::zeros({2}, at::kDouble);
  data::Batch batch;
  const int64_t stride = kRowsAtOnce * world.size();
  for (int64_t round = 0; round < dataset->size(); round += stride) {
    // A rank that has no rows left takes the first one again, for nothing: under FSDP the others'
    // forward needs its shards.
    const int64_t begin = round + kRowsAtOnce * world.rank();
    const bool is_left = begin < dataset->size();
    std::vector<int64_t> rows(is_left ? std::min(kRowsAtOnce, dataset->size() - begin) : 1);
    std::iota(rows.begin(), rows.end(), is_left ? begin : 0);
    if (absl::Status status = dataset->ReadInto(rows, batch); !status.ok()) return status;
    const at::Tensor labels = batch.To("labels", world.device());
    const at::Tensor logits = model.forward(batch.To("images", world.device()));
    if (!is_left) continue;
    const at::Tensor loss =
        at::cross_entropy_loss(logits, labels, /*weight=*/{}, at::Reduction::Sum);
    sums[0] += loss.item<double>();
    sums[1] += logits.argmax(/*dim=*/1).eq(labels).sum().item<double>();
  }
  sums = sums.to(world.device());
  if (absl::Status status = world.AllReduce(sums, comm::ReduceOp::kSum).Wait(); !status.ok()) {
    return status;
  }
  const auto count = static_cast<double>(dataset->size());
  return Evaluation{.loss = sums[0].item<double>() / count,
                    .accuracy = 100 * sums[1].item<double>() / count};
}

}  // namespace lockstep::tutorials

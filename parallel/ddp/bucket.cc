#include "lockstep/parallel/ddp/bucket.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <map>
#include <utility>

#include "lockstep/tools/trace/memory.h"

namespace lockstep::parallel::ddp {

std::vector<BucketIndices> AssignBuckets(const std::vector<at::Tensor>& parameters,
                                         absl::Span<const size_t> order,
                                         absl::Span<const int64_t> limits) {
  struct Open {
    size_t place = 0;  // of its first parameter
    BucketIndices indices;
    int64_t bytes = 0;
    size_t limit = 0;
  };
  std::map<std::pair<at::ScalarType, std::string>, Open> open;
  std::vector<std::pair<size_t, BucketIndices>> closed;
  for (size_t place = 0; place < order.size(); ++place) {
    const at::Tensor& parameter = parameters[order[place]];
    Open& bucket = open[{parameter.scalar_type(), parameter.device().str()}];
    if (bucket.indices.empty()) bucket.place = place;
    bucket.indices.push_back(order[place]);
    bucket.bytes += static_cast<int64_t>(parameter.nbytes());
    if (bucket.bytes >= limits[bucket.limit]) {
      closed.emplace_back(bucket.place, std::move(bucket.indices));
      bucket = {.limit = std::min(bucket.limit + 1, limits.size() - 1)};
    }
  }
  for (auto& [key, bucket] : open) {
    if (!bucket.indices.empty()) closed.emplace_back(bucket.place, std::move(bucket.indices));
  }
  std::sort(closed.begin(), closed.end());
  std::vector<BucketIndices> buckets;
  for (auto& [place, indices] : closed) buckets.push_back(std::move(indices));
  return buckets;
}

Bucket::Bucket(const std::vector<at::Tensor>& parameters, BucketIndices indices,
               comm::Communicator& comm)
    : indices_(std::move(indices)) {
  int64_t count = 0;
  for (size_t index : indices_) count += parameters[index].numel();
  {
    trace::MemoryScope scope(trace::MemoryCategory::kGradients);
    flat_ = comm.Empty({count}, parameters[indices_[0]].scalar_type());
  }
  // Aliases and not autograd's views: LibTorch's zero_grad() detaches gradients in place, which
  // views refuse.
  at::AutoDispatchBelowADInplaceOrView no_views;
  int64_t offset = 0;
  for (size_t index : indices_) {
    const at::Tensor& parameter = parameters[index];
    const at::Tensor place = flat_.narrow(0, offset, parameter.numel());
    views_.push_back(parameter.is_non_overlapping_and_dense()
                         ? place.as_strided(parameter.sizes(), parameter.strides())
                         : place.view(parameter.sizes()));
    offset += parameter.numel();
  }
}

}  // namespace lockstep::parallel::ddp

#include "lockstep/data/sampler.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "lockstep/data/random.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::data {
namespace {

void CheckSize(int64_t size) {
  if (size < 1) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("sampler: a dataset of ", size, " rows has nothing to sample")));
  }
}

}  // namespace

SequentialSampler::SequentialSampler(int64_t size) : size_(size) { CheckSize(size); }

std::vector<int64_t> SequentialSampler::Rows(Position from) const {
  std::vector<int64_t> rows(std::max<int64_t>(0, size_ - from.rows));
  std::iota(rows.begin(), rows.end(), from.rows);
  return rows;
}

DistributedSampler::DistributedSampler(DistributedSamplerOptions options) : options_(options) {
  CheckSize(options_.size);
  if (options_.rank < 0 || options_.rank >= options_.world) {
    throw StatusError(absl::InvalidArgumentError(absl::StrCat(
        "sampler: rank ", options_.rank, " is not one of the ", options_.world, " ranks")));
  }
  if (options_.drop_last && options_.size < options_.world) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("sampler: drop_last leaves nothing of ", options_.size, " rows for ",
                     options_.world, " ranks; use fewer ranks or drop_last = false")));
  }
}

int64_t DistributedSampler::size() const {
  const int64_t padding = options_.drop_last ? 0 : options_.world - 1;
  return (options_.size + padding) / options_.world;
}

std::vector<int64_t> DistributedSampler::Rows(Position from) const {
  const int64_t left = options_.size - from.rows;
  if (left <= 0) return {};
  std::vector<int64_t> order;
  if (options_.shuffle) order = Permutation(options_.size, options_.seed, from.epoch);
  const int64_t padding = options_.drop_last ? 0 : options_.world - 1;
  std::vector<int64_t> rows((left + padding) / options_.world);
  int64_t entry = from.rows + options_.rank;
  for (int64_t& row : rows) {
    row = entry % options_.size;
    if (options_.shuffle) row = order[row];
    entry += options_.world;
  }
  return rows;
}

std::vector<int64_t> Permutation(int64_t size, uint64_t seed, int64_t epoch) {
  std::vector<int64_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 generator(Mix(Mix(seed) ^ static_cast<uint64_t>(epoch)));
  for (int64_t last = size - 1; last > 0; --last) {
    std::swap(order[last], order[Bounded(generator, last + 1)]);
  }
  return order;
}

}  // namespace lockstep::data

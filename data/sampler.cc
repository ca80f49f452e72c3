#include "lockstep/data/sampler.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
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

void Position::Advance(int world, int64_t more) {
  if (more == 0) return;
  const bool known = rows == 0 || !stretches.empty();
  rows += more;
  if (!known) return;
  if (stretches.empty() || stretches.back().world != world) stretches.push_back({.world = world});
  stretches.back().rows += more;
}

std::string ToString(const Position& position) {
  return absl::StrCat(
      position.epoch, ":",
      position.stretches.empty() && position.rows != 0 ? absl::StrCat(position.rows) : "",
      absl::StrJoin(position.stretches, "+", [](std::string* out, const Stretch& stretch) {
        absl::StrAppend(out, stretch.rows, "/", stretch.world);
      }));
}

absl::StatusOr<Position> ParsePosition(std::string_view text) {
  const absl::Status wrong = absl::InvalidArgumentError(absl::StrCat(
      "'", std::string{text}, "' is no position of a loader, which looks like 3:1000/4+600/3"));
  const std::vector<std::string> parts = absl::StrSplit(std::string{text}, ':');
  Position position;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &position.epoch) || position.epoch < 0) {
    return wrong;
  }
  if (int64_t rows; absl::SimpleAtoi(parts[1], &rows)) {
    if (rows < 1) return wrong;
    position.rows = rows;
    return position;
  }
  if (parts[1].empty()) return position;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(parts[1], '+'))) {
    const std::vector<std::string> numbers = absl::StrSplit(part, '/');
    Stretch stretch;
    if (numbers.size() != 2 || !absl::SimpleAtoi(numbers[0], &stretch.rows) ||
        !absl::SimpleAtoi(numbers[1], &stretch.world) || stretch.rows < 1 || stretch.world < 1) {
      return wrong;
    }
    position.rows += stretch.rows;
    position.stretches.push_back(stretch);
  }
  return position;
}

std::vector<int64_t> Sampler::Rows(Position from) const {
  const std::unique_ptr<RowOrder> order = Order(std::move(from));
  std::vector<int64_t> rows(order->left());
  order->Take(absl::MakeSpan(rows));
  return rows;
}

SequentialSampler::SequentialSampler(int64_t size) : size_(size) { CheckSize(size); }

std::unique_ptr<RowOrder> SequentialSampler::Order(Position from) const {
  return RangeOrder({from.rows, size_});
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

std::unique_ptr<RowOrder> DistributedSampler::Order(Position from) const {
  const int64_t left = options_.size - from.rows;
  if (left <= 0) return ListedOrder({});
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
  return ListedOrder(std::move(rows));
}

std::vector<int64_t> Permutation(int64_t size, uint64_t seed, int64_t epoch) {
  std::vector<int64_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 generator(Mix(Mix(seed) ^ static_cast<uint64_t>(epoch)));
  Shuffle(absl::MakeSpan(order), generator);
  return order;
}

}  // namespace lockstep::data

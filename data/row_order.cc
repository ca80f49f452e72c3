#include "lockstep/data/row_order.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace lockstep::data {
namespace {

class Listed : public RowOrder {
 public:
  explicit Listed(std::vector<int64_t> rows) : rows_(std::move(rows)) {}

  int64_t left() const override { return static_cast<int64_t>(rows_.size()) - next_; }

  int64_t Take(absl::Span<int64_t> rows) override {
    const int64_t count = std::min<int64_t>(rows.size(), left());
    std::copy_n(rows_.begin() + next_, count, rows.begin());
    next_ += count;
    return count;
  }

 private:
  const std::vector<int64_t> rows_;
  int64_t next_ = 0;
};

class Range : public RowOrder {
 public:
  explicit Range(RowRange range) : range_(range) {}

  int64_t left() const override { return std::max<int64_t>(0, range_.size()); }

  int64_t Take(absl::Span<int64_t> rows) override {
    const int64_t count = std::min<int64_t>(rows.size(), left());
    std::iota(rows.begin(), rows.begin() + count, range_.begin);
    range_.begin += count;
    return count;
  }

 private:
  RowRange range_;
};

}  // namespace

std::unique_ptr<RowOrder> ListedOrder(std::vector<int64_t> rows) {
  return std::make_unique<Listed>(std::move(rows));
}

std::unique_ptr<RowOrder> RangeOrder(RowRange range) { return std::make_unique<Range>(range); }

}  // namespace lockstep::data

#include "lockstep/tutorials/common/progress.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"

namespace lockstep::tutorials {
namespace {

constexpr int64_t kCells = 30;
constexpr char kClearLine[] = "\r\033[K";  // ECMA-48, which every terminal of today knows

}  // namespace

Progress::Progress(std::string label, int64_t total, const ProgressOptions& options)
    : label_(std::move(label)), total_(std::max<int64_t>(total, 1)), options_(options) {
  if (options_.enabled) Draw(/*note=*/"");
}

Progress::~Progress() {
  if (options_.enabled) *options_.out << kClearLine << std::flush;
}

void Progress::Advance(const std::string& note) {
  ++done_;
  if (options_.enabled && absl::Now() - drawn_ >= options_.interval) Draw(note);
}

void Progress::Draw(const std::string& note) {
  drawn_ = absl::Now();
  const int64_t full = kCells * std::min(done_, total_) / total_;
  *options_.out << kClearLine << label_ << " [" << std::string(full, '#')
                << std::string(kCells - full, '.') << "] " << done_ << "/" << total_
                << (note.empty() ? "" : "  ") << note << std::flush;
}

}  // namespace lockstep::tutorials

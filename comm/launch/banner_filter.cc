#include "lockstep/comm/launch/banner_filter.h"

#include <regex>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace lockstep::launch {
namespace {

constexpr size_t kFrameLength = 74;

bool IsFirstLineOfMpirun(const std::string& line) {
  return absl::StartsWith(line, "Primary job ") || absl::StartsWith(line, "mpirun ") ||
         absl::StartsWith(line, "MPI_ABORT ") || absl::StartsWith(line, "prterun ");
}

// What Open MPI 4.1 says after each MPI_Abort.
bool IsNoise(const std::string& line) {
  return absl::StrContains(line, "ORTE_ERROR_LOG: Data unpack would read past end of buffer") &&
         absl::StrContains(line, "show_help.c");
}

std::string Shorten(const std::string& block) {
  static const std::regex signalled(
      R"(process rank (\d+) .*\s?exited on\s+signal (\d+)( \([^)]*\))?)");
  static const std::regex exited(R"(Process name: \S*,(\d+)\]\s+Exit code:\s+(\d+))");
  static const std::regex improper(
      R"(has exited due to process rank (\d+)[^.]*\s+exiting\s+improperly)");
  static const std::regex aborted(R"(MPI_ABORT was invoked on rank (\d+))");
  std::smatch match;
  if (std::regex_search(block, match, aborted)) {
    return absl::StrCat("rank ", match[1].str(), " called MPI_Abort\n");
  }
  if (std::regex_search(block, match, signalled)) {
    return absl::StrCat("rank ", match[1].str(), " was killed by signal ", match[2].str(),
                        match[3].str(), "\n");
  }
  if (std::regex_search(block, match, exited)) {
    return absl::StrCat("rank ", match[1].str(), " exited with status ", match[2].str(), "\n");
  }
  if (std::regex_search(block, match, improper)) {
    return absl::StrCat(
        "rank ", match[1].str(),
        " exited with status 0 without finalizing MPI: after an error, or by _exit\n");
  }
  if (absl::StartsWith(block, "Primary job  terminated normally, but")) return "";
  const std::string frame(kFrameLength, '-');
  return absl::StrCat(frame, "\n", block, frame, "\n");
}

}  // namespace

std::string BannerFilter::Add(const std::string& bytes) {
  std::string shown;
  for (const char c : bytes) {
    line_ += c;
    if (c == '\n') {
      shown += shown_part_ ? line_ : TakeLine(line_);
      line_.clear();
      shown_part_ = false;
    }
  }
  const bool may_be_frame = !shown_part_ && line_.size() <= kFrameLength &&
                            line_.find_first_not_of('-') == std::string::npos;
  if (!framed_ && !may_be_frame) {
    shown += line_;
    line_.clear();
    shown_part_ = true;
  }
  return shown;
}

std::string BannerFilter::TakeLine(const std::string& line) {
  const std::string frame = absl::StrCat(std::string(kFrameLength, '-'), "\n");
  if (line == frame) {
    if (framed_ && block_.empty()) return frame;  // closed one message, opens the next
    framed_ = !framed_;
    return framed_ ? "" : Shorten(std::exchange(block_, ""));
  }
  // Open MPI 5 and later begin with an empty line.
  const bool begins = block_.find_first_not_of('\n') == std::string::npos;
  if (framed_ && begins && line != "\n" && !IsFirstLineOfMpirun(line)) {
    framed_ = false;
    return absl::StrCat(frame, std::exchange(block_, ""), line);
  }
  if (framed_) {
    block_ += line;
    return "";
  }
  return IsNoise(line) ? "" : line;
}

std::string BannerFilter::Finish() {
  std::string rest = block_ + line_;
  if (framed_) rest = absl::StrCat(std::string(kFrameLength, '-'), "\n", rest);
  *this = BannerFilter();
  return rest;
}

}  // namespace lockstep::launch

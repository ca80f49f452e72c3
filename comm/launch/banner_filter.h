#pragma once

#include <string>

// Shortens what mpirun of Open MPI says when a rank fails. Private to this folder.
namespace lockstep::launch {

// mpirun frames its messages by lines of 74 dashes. Those that say how a rank ended become one
// line, "rank 1 was killed by signal 9 (Killed)"; those that only accompany these vanish; all else
// passes unchanged and at once, but for an unfinished line that may yet become a frame.
class BannerFilter {
 public:
  std::string Add(const std::string& bytes);  // what to show now
  std::string Finish();                       // the rest, at the end of input

 private:
  std::string TakeLine(const std::string& line);

  std::string line_;         // bytes of the unfinished line that are not shown yet
  bool shown_part_ = false;  // of the unfinished line
  bool framed_ = false;
  std::string block_;  // lines since the opening frame
};

}  // namespace lockstep::launch

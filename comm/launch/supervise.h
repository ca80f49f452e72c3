#pragma once

#include <string>
#include <vector>

// How RelaunchIfAlone runs mpirun. Private to this folder.
namespace lockstep::launch {

struct Command {
  std::vector<std::string> arguments;    // [0] is the path of the executable
  std::vector<std::string> environment;  // NAME=value, all of it
  std::vector<std::string> scratch;      // folders to remove when the command has ended
};

// Runs the command as a process group of its own, and waits until it and all processes that come
// from it have ended. Returns its exit status, 128 + S where it ended by signal S or where this
// process received S = SIGINT, SIGTERM, SIGHUP or SIGQUIT. Then the children of the command get
// SIGTERM, the command does ten seconds later, and at a second signal all get SIGKILL.
//
// Two processes guard the run, as each may be killed: this one, and a child of it which starts the
// command, passes on its stderr less the banners of mpirun (BannerFilter), adopts the
// orphans of the command, and removes `scratch`.
int Supervise(const Command& command);

}  // namespace lockstep::launch

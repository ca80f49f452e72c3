#pragma once

#include <map>
#include <string>
#include <vector>

namespace lockstep::tutorials {

// For tests: what a program did.
struct Outcome {
  int exit_status = 0;  // minus the signal, where one ended it
  std::string out;
  std::string err;
};

struct RunOptions {
  std::map<std::string, std::string> environment;  // beside that of the test. Default: nothing.
  bool terminal = false;  // Stderr is a terminal, as seen by the program. Default: false, a file.
};

// Runs a program to its end: words[0] is its path, relative to the test's runfiles.
Outcome RunProgram(std::vector<std::string> words, const RunOptions& options = {});

}  // namespace lockstep::tutorials

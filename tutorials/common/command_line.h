#pragma once

#include <string>

#include "absl/status/status.h"

namespace lockstep::tutorials {

// What --help says beside the flags.
struct Usage {
  std::string summary;  // what the program does, in a sentence or two
  std::string example;  // one command line
};

// Sets the Abseil flags of this program as argv says: --name=value, --name value, --name and
// --noname where it is a bool. INVALID_ARGUMENT for a flag that is not there (naming the one that
// was probably meant), a value that the flag refuses, a missing value, and an argument that is no
// flag.
//
// absl::ParseCommandLine ends the program itself, prints two lines for some errors, fails after
// --help, and adds a dozen flags of its own that a newcomer does not need.
absl::Status SetFlags(int argc, char** argv);

// Whether argv asks for help: --help or -h.
bool WantsHelp(int argc, char** argv);

// Usage and flags with their values so far, so before SetFlags: their defaults. Those that main.cc
// or PROGRAM.cc defines come first.
std::string HelpText(const std::string& program, const Usage& usage);

}  // namespace lockstep::tutorials

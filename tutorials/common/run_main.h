#pragma once

#include <functional>

#include "absl/status/status.h"
#include "lockstep/tutorials/common/command_line.h"

namespace lockstep::tutorials {

// The main of a program of one process (world.h has that of ranks):
//
//   ABSL_FLAG(lockstep::tutorials::Count, epochs, 3, "passes over the training images");
//
//   absl::Status Train() { ... }  // or throws: StatusError, c10::Error, any std::exception
//
//   int main(int argc, char** argv) {
//     return lockstep::tutorials::RunMain(
//         argc, argv,
//         {.summary = "trains a classifier of Fashion-MNIST in one process.",
//          .example = "bazel run //tutorials:mnist_training -- --epochs=1"},
//         Train);
//   }
//
// Exit status: 0 after body succeeded and after --help, 1 after it failed, 2 where a flag is wrong.
// A failure is one line on stderr, "PROGRAM: what was wrong", or "PROGRAM: rank 2: ..." where a
// launcher started several ranks. Of LibTorch's exceptions it shows the first line, without the
// stack. Signals end the program as they always do. malloc keeps what is freed (KeepFreedMemory).
// Relative paths start at the folder where `bazel run` was typed.
int RunMain(int argc, char** argv, const Usage& usage, const std::function<absl::Status()>& body);

// What RunMain and RunRanks return after body succeeded, in the place of 0: for a program that ends
// early and is to be started again.
void SetExitStatus(int exit_status);

// For world.h: the parts of RunMain.

int ExitStatus();

// Sets the flags; ends the program after --help and where a flag is wrong.
void SetFlagsOrExit(int argc, char** argv, const Usage& usage);

// Under `bazel run`, which starts programs elsewhere: goes to the folder where that was typed, so
// that relative paths in flags mean what the user thinks.
void EnterUsersFolder();

// Runs body, with exceptions made into errors.
absl::Status StatusOf(const std::function<absl::Status()>& body);

// Prints an error as said above.
void PrintError(const absl::Status& error);

// Ends the program with what it printed so far, and without destructors and exit handlers, which
// might wait for ranks that are gone.
[[noreturn]] void ExitAtOnce(int exit_status);

}  // namespace lockstep::tutorials

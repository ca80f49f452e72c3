// Programs of several ranks that are ended early and started again.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lockstep/tutorials/common/subprocess.h"

namespace lockstep::tutorials {
namespace {

namespace fs = std::filesystem;

constexpr char kProgram[] = "tutorials/common/checkpoint_test_program";

std::string NewFolder(const std::string& name) {
  const std::string path = absl::StrCat(testing::TempDir(), "/", name);
  fs::remove_all(path);
  return path;
}

// "loss ..." at the end of what a program printed.
std::string LastLine(const std::string& out) {
  return out.substr(out.rfind('\n', out.size() - 2) + 1);
}

TEST(CheckpointFlagsTest, GoesOnAfterEachTimeLimit) {
  const Outcome whole = RunProgram({kProgram});
  ASSERT_EQ(whole.exit_status, 0) << whole.err;
  const std::string folder = NewFolder("limited");
  int runs = 0;
  Outcome part;
  do {
    part = RunProgram({kProgram, "--time_limit=300ms", "--checkpoint_dir=" + folder});
    if (part.exit_status == 0) break;
    EXPECT_TRUE(absl::StrContains(part.err, "and ended, as told: run it again")) << part.err;
  } while (part.exit_status == 75 && ++runs < 400);
  EXPECT_EQ(part.exit_status, 0) << part.err;
  EXPECT_GE(runs, 1);
  EXPECT_EQ(LastLine(part.out), LastLine(whole.out));
}

// The one who started the ranks gets the signal, and passes it on.
TEST(CheckpointFlagsTest, SavesOnSigterm) {
  const std::string folder = NewFolder("terminated");
  const std::string command = absl::StrCat(kProgram, " --checkpoint_dir=", folder);
  const Outcome part =
      RunProgram({"/bin/sh", "-c",
                  command + "& until [ -e " + folder +
                      "/lock ]; do sleep 0.01; done; sleep 0.1; kill -TERM $!; wait $!"});
  EXPECT_EQ(part.exit_status, 128 + 15) << part.err;
  EXPECT_TRUE(absl::StrContains(part.err, "and ended, as told: run it again")) << part.err;
  const Outcome rest = RunProgram({kProgram, "--checkpoint_dir=" + folder});
  EXPECT_EQ(rest.exit_status, 0) << rest.err;
  EXPECT_FALSE(absl::StartsWith(rest.out, "begins at step 0\n")) << rest.out;
  EXPECT_EQ(LastLine(rest.out), LastLine(RunProgram({kProgram}).out));
}

TEST(CheckpointFlagsTest, TwoJobsInOneFolder) {
  const std::string folder = NewFolder("shared");
  const std::string command = absl::StrCat(kProgram, " --checkpoint_dir=", folder);
  const Outcome outcome =
      RunProgram({"/bin/sh", "-c",
                  command + " >&2 & until [ -e " + folder + "/lock ]; do sleep 0.01; done; " +
                      command + "; status=$?; kill $!; wait $!; exit $status"});
  EXPECT_EQ(outcome.exit_status, 1) << outcome.err;
  EXPECT_TRUE(absl::StrContains(outcome.err, "saves checkpoints into this folder")) << outcome.err;
}

}  // namespace
}  // namespace lockstep::tutorials

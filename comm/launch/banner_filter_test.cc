#include "lockstep/comm/launch/banner_filter.h"

#include <gtest/gtest.h>

#include <string>

namespace lockstep::launch {
namespace {

const std::string kFrame = std::string(74, '-') + "\n";

// The output for input that comes in pieces of `size` bytes.
std::string Filter(const std::string& input, size_t size) {
  BannerFilter filter;
  std::string output;
  for (size_t i = 0; i < input.size(); i += size) output += filter.Add(input.substr(i, size));
  return output + filter.Finish();
}

void ExpectFiltered(const std::string& input, const std::string& output) {
  for (const size_t size : {size_t{1}, size_t{7}, size_t{4096}}) {
    EXPECT_EQ(Filter(input, size), output) << "in pieces of " << size;
  }
}

const std::string kPrimary =
    kFrame +
    "Primary job  terminated normally, but 1 process returned\n"
    "a non-zero exit code. Per user-direction, the job has been aborted.\n" +
    kFrame;

TEST(BannerFilterTest, NamesKilledRank) {
  ExpectFiltered("before\n" + kPrimary + kFrame +
                     "mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 "
                     "(Killed).\n" +
                     kFrame + "after\n",
                 "before\nrank 1 was killed by signal 9 (Killed)\nafter\n");
}

TEST(BannerFilterTest, NamesFailingRank) {
  ExpectFiltered(kPrimary + kFrame +
                     "mpirun detected that one or more processes exited with non-zero status, thus "
                     "causing\nthe job to be terminated. The first process to do so was:\n\n"
                     "  Process name: [[28691,1],12]\n  Exit code:    3\n" +
                     kFrame,
                 "rank 12 exited with status 3\n");
}

TEST(BannerFilterTest, NamesRanksOfOpenMpi5) {
  ExpectFiltered(kFrame +
                     "\nprterun noticed that process rank 2 with PID 1183 on node vm exited on\n"
                     "signal 9 (Killed).\n" +
                     kFrame,
                 "rank 2 was killed by signal 9 (Killed)\n");
  ExpectFiltered(kFrame +
                     "\nprterun detected that one or more processes exited with non-zero status,\n"
                     "thus causing the job to be terminated. The first process to do so was:\n\n"
                     "   Process name: [prterun-vm-999@1,1]\n   Exit code:    3\n" +
                     kFrame,
                 "rank 1 exited with status 3\n");
  ExpectFiltered(kFrame + "\nmine\n" + kFrame, kFrame + "\nmine\n" + kFrame);
}

TEST(BannerFilterTest, NamesRankThatDidNotFinalize) {
  ExpectFiltered(
      kFrame +
          "mpirun has exited due to process rank 1 with PID 0 on\n"
          "node vm exiting improperly. There are three reasons this could occur:\n\n"
          "1. this process did not call \"init\" before exiting, but others in\nthe job did.\n" +
          kFrame,
      "rank 1 exited with status 0 without finalizing MPI: after an error, or by _exit\n");
}

TEST(BannerFilterTest, NamesAbortingRank) {
  ExpectFiltered(kFrame +
                     "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n"
                     "with errorcode 5.\n\n"
                     "NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.\n" +
                     kFrame,
                 "rank 1 called MPI_Abort\n");
  BannerFilter filter;
  EXPECT_EQ(
      filter.Add("[vm:07495] [[29113,0],0] ORTE_ERROR_LOG: Data unpack would read past end of "
                 "buffer in file ../../../orte/util/show_help.c at line 501\n"),
      "");
}

TEST(BannerFilterTest, LeavesOtherMessagesOfMpirunAlone) {
  const std::string message =
      kFrame + "mpirun was unable to find the specified executable file\n" + kFrame;
  ExpectFiltered(message, message);
}

TEST(BannerFilterTest, LeavesOutputOfRanksAlone) {
  const std::string text =
      kFrame + "| a table |\n" + kFrame + kFrame + "--- x\n-\n\n" + kFrame + "unfinished";
  ExpectFiltered(text, text);
  ExpectFiltered(kFrame + "mpirun is not done", kFrame + "mpirun is not done");
  ExpectFiltered("-", "-");
}

TEST(BannerFilterTest, ShowsUnfinishedLinesAtOnce) {
  BannerFilter filter;
  EXPECT_EQ(filter.Add("step 1"), "step 1");
  EXPECT_EQ(filter.Add("\rstep 2"), "\rstep 2");
  EXPECT_EQ(filter.Add("\n-x"), "\n-x");
}

}  // namespace
}  // namespace lockstep::launch

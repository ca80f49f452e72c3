#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace {

namespace fs = std::filesystem;

constexpr char kProgram[] = "comm/launch/relaunch_test_program";
constexpr auto kPatience = std::chrono::seconds(60);

std::string ReadFile(const fs::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

bool Eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    usleep(10000);
  }
  return true;
}

// Processes whose command line has the text, zombies left out.
std::vector<std::string> ProcessesWith(const std::string& text) {
  std::vector<std::string> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/proc", ignored)) {
    std::string words = ReadFile(entry.path() / "cmdline");
    std::replace(words.begin(), words.end(), '\0', ' ');
    if (absl::StrContains(words, text)) found.push_back(words);
  }
  return found;
}

// One run of the program, in the background, with its output in files.
class Program {
 public:
  using Variables = std::map<std::string, std::string>;

  Program(const std::string& mode, std::vector<std::string> flags, Variables variables = {}) {
    static int count = 0;
    dir_ = fs::path(testing::TempDir()) / absl::StrCat("run", getpid(), ".", ++count, ".end");
    fs::create_directories(dir_);
    std::vector<std::string> words = {fs::absolute(kProgram), absl::StrCat("--dir=", dir_.string()),
                                      absl::StrCat("--mode=", mode)};
    words.insert(words.end(), flags.begin(), flags.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(open((dir_ / "out").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), 1);
      dup2(open((dir_ / "err").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), 2);
      for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
      signal(SIGINT, SIG_DFL);
      execv(argv[0], argv.data());
      _exit(126);
    }
  }

  ~Program() {
    for (const std::string& words : ProcessesWith(dir_.string()))
      ADD_FAILURE() << "left: " << words;
    fs::remove_all(dir_);
  }

  // Waits until all ranks have come past MPI_Init.
  bool Started(int ranks) {
    return Eventually([&] {
      for (int rank = 0; rank < ranks; ++rank) {
        if (!fs::exists(dir_ / absl::StrCat("rank", rank))) return false;
      }
      return true;
    });
  }

  void Kill(int signal) { kill(pid_, signal); }
  void KillRank(int rank, int signal) {
    kill(std::stoi(ReadFile(dir_ / absl::StrCat("rank", rank))), signal);
  }
  pid_t mpirun() const { return std::stoi(Scratch()[2]); }

  // Exit status, or minus the signal that ended the process; -1000 where it did not end.
  int Wait() {
    int status = 0;
    if (!Eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; })) return -1000;
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }

  // That neither processes nor the run's folders are left, now or (where the first process had no
  // say in its end) soon.
  void ExpectNothingLeft() {
    EXPECT_TRUE(Eventually([&] { return ProcessesWith(dir_.string()).empty(); }));
    const std::string session = Scratch()[0].substr(0, std::string("/tmp/lockstep.XXXXXX").size());
    EXPECT_TRUE(absl::StartsWith(session, "/tmp/lockstep.")) << session;
    EXPECT_TRUE(Eventually([&] { return !fs::exists(session); })) << session;
    EXPECT_TRUE(absl::StartsWith(Scratch()[1], "/dev/shm/lockstep.")) << Scratch()[1];
    EXPECT_TRUE(Eventually([&] { return !fs::exists(Scratch()[1]); })) << Scratch()[1];
  }

  std::string Out() const { return ReadFile(dir_ / "out"); }
  std::string Err() const { return ReadFile(dir_ / "err"); }
  std::vector<std::string> SortedLines() const {
    std::vector<std::string> lines = absl::StrSplit(Out(), '\n', absl::SkipEmpty());
    std::sort(lines.begin(), lines.end());
    return lines;
  }

 private:
  std::vector<std::string> Scratch() const {
    return absl::StrSplit(ReadFile(dir_ / "scratch"), '\n');
  }

  fs::path dir_;
  pid_t pid_ = 0;
};

std::string Cores(int ranks) {
  cpu_set_t cores;
  sched_getaffinity(0, sizeof(cores), &cores);
  return absl::StrCat(std::max(1, CPU_COUNT(&cores) / ranks));
}

TEST(RelaunchTest, StartsRanksAndPassesOtherArguments) {
  unsetenv("OMP_NUM_THREADS");
  Program run("ok", {"--steps=7", "--ranks=3", "--", "--ranks=5"}, {{"TMPDIR", "/elsewhere"}});
  EXPECT_EQ(run.Wait(), 0);
  std::vector<std::string> expected;
  for (int rank = 0; rank < 3; ++rank) {
    expected.push_back(absl::StrCat("rank ", rank, " of 3 sum 6 launcher mpirun args --steps=7 -- ",
                                    "--ranks=5 terminal 0 threads ", Cores(3),
                                    " tmpdir /elsewhere input -1"));
  }
  EXPECT_EQ(run.SortedLines(), expected);
  EXPECT_EQ(run.Err(), "");
  run.ExpectNothingLeft();
}

TEST(RelaunchTest, KeepsTheUsersThreadCount) {
  Program run("ok", {"--ranks", "2"}, {{"OMP_NUM_THREADS", "5"}});
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_EQ(run.SortedLines().size(), 2);
  EXPECT_TRUE(
      absl::StrContains(run.Out(), "rank 1 of 2 sum 3 launcher mpirun args terminal 0 threads 5"))
      << run.Out();
}

TEST(RelaunchTest, OneRankRunsInPlace) {
  Program run("ok", {"--ranks=1"});
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_TRUE(absl::StartsWith(run.Out(), "rank 0 of 1 sum 1 launcher no launcher args"))
      << run.Out();
}

TEST(RelaunchTest, HelpRunsInPlace) {
  Program run("ok", {"--help"});
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_TRUE(absl::StartsWith(run.Out(), "rank 0 of 1 sum 1 launcher no launcher args --help"))
      << run.Out();
}

TEST(RelaunchTest, RefusesBadRankCounts) {
  for (const std::string flag : {"--ranks=0", "--ranks=two", "--ranks=", "--ranks=-1"}) {
    Program run("ok", {flag});
    EXPECT_EQ(run.Wait(), 2);
    EXPECT_EQ(run.Err(), absl::StrCat("relaunch_test_program: ", flag,
                                      ": give a number of ranks from 1 up, as in --ranks=2\n"));
  }
}

TEST(RelaunchTest, RefusesRankCountThatLauncherContradicts) {
  Program run("ok", {"--ranks=2"},
              {{"RANK", "0"},
               {"WORLD_SIZE", "4"},
               {"LOCAL_RANK", "0"},
               {"MASTER_ADDR", "localhost"},
               {"MASTER_PORT", "29500"}});
  EXPECT_EQ(run.Wait(), 2);
  EXPECT_EQ(run.Err(),
            "relaunch_test_program: --ranks=2, but torchrun-style variables started 4 ranks: leave "
            "--ranks out\n");
}

TEST(RelaunchTest, NamesWhatIsMissing) {
  Program run("ok", {"--ranks=2"}, {{"LOCKSTEP_MPIRUN", "/nowhere/mpirun"}});
  EXPECT_EQ(run.Wait(), 2);
  EXPECT_EQ(
      run.Err(),
      "relaunch_test_program: no program /nowhere/mpirun to start ranks with: LOCKSTEP_MPIRUN "
      "must be the path of mpirun\n");
}

TEST(RelaunchTest, RefusesAnMpirunThatIsNotOpenMpi) {
  const fs::path fake = fs::path(testing::TempDir()) / "mpirun";
  std::ofstream(fake) << "#!/bin/sh\nshift 6\nexec \"$@\"\n";
  chmod(fake.c_str(), 0700);
  Program run("ok", {"--ranks=2"}, {{"LOCKSTEP_MPIRUN", fake.string()}});
  EXPECT_EQ(run.Wait(), 2);
  EXPECT_EQ(
      run.Err(),
      "relaunch_test_program: mpirun started this rank without OMPI_COMM_WORLD_RANK: it is not "
      "that of Open MPI; set LOCKSTEP_MPIRUN to the path of one that is\n");
}

TEST(RelaunchTest, FailingRankEndsAll) {
  Program run("exit", {"--ranks=3"});
  EXPECT_EQ(run.Wait(), 3);
  EXPECT_EQ(run.Err(), "rank 1 exited with status 3\n");
  run.ExpectNothingLeft();
}

TEST(RelaunchTest, AbortingRankEndsAll) {
  Program run("mpi_abort", {"--ranks=3"});
  EXPECT_EQ(run.Wait(), 5);
  run.ExpectNothingLeft();
}

class KilledRankTest : public testing::TestWithParam<const char*> {};

TEST_P(KilledRankTest, EndsAllAndIsNamed) {
  Program run(GetParam(), {"--ranks=3"});
  ASSERT_TRUE(run.Started(3)) << run.Err();
  run.KillRank(2, SIGKILL);
  EXPECT_EQ(run.Wait(), 137);
  EXPECT_EQ(run.Err(), "rank 2 was killed by signal 9 (Killed)\n");
  run.ExpectNothingLeft();
}

INSTANTIATE_TEST_SUITE_P(RelaunchTest, KilledRankTest,
                         testing::Values("wait", "no_mpi", "stubborn"),
                         [](const auto& info) { return std::string(info.param); });

class EndingSignalTest : public testing::TestWithParam<int> {};

TEST_P(EndingSignalTest, EndsAll) {
  for (const std::string mode : {"wait", "stubborn"}) {
    Program run(mode, {"--ranks=2"});
    ASSERT_TRUE(run.Started(2)) << run.Err();
    run.Kill(GetParam());
    EXPECT_EQ(run.Wait(), 128 + GetParam()) << mode;
    run.ExpectNothingLeft();
  }
}

INSTANTIATE_TEST_SUITE_P(RelaunchTest, EndingSignalTest, testing::Values(SIGINT, SIGTERM, SIGHUP),
                         [](const auto& info) { return absl::StrCat("Signal", info.param); });

TEST(RelaunchTest, KilledParentEndsAll) {
  for (const std::string mode : {"wait", "stubborn"}) {
    Program run(mode, {"--ranks=2"});
    ASSERT_TRUE(run.Started(2)) << run.Err();
    run.Kill(SIGKILL);
    EXPECT_EQ(run.Wait(), -SIGKILL) << mode;
    run.ExpectNothingLeft();
  }
}

TEST(RelaunchTest, KilledMpirunEndsAll) {
  for (const std::string mode : {"wait", "stubborn"}) {
    Program run(mode, {"--ranks=2"});
    ASSERT_TRUE(run.Started(2)) << run.Err();
    kill(run.mpirun(), SIGKILL);
    EXPECT_EQ(run.Wait(), 137) << mode;
    EXPECT_TRUE(absl::EndsWith(run.Err(), "mpirun was killed by signal 9 (Killed)\n")) << run.Err();
    run.ExpectNothingLeft();
  }
}

}  // namespace

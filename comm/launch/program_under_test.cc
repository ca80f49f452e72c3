#include "lockstep/comm/launch/program_under_test.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace lockstep::launch::testing {
namespace {

namespace fs = std::filesystem;

constexpr auto kPatience = std::chrono::seconds(60);

// Command lines of the processes whose command line has the text, zombies left out.
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

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "unset" : value;
}

// So that readers see all of it or nothing.
void Write(const std::string& path, const std::string& text) {
  std::ofstream(path + ".new") << text << std::endl;
  std::rename((path + ".new").c_str(), path.c_str());
}

}  // namespace

std::string ReadFile(const std::string& path) {
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

void WriteScratch(const std::string& dir, int rank) {
  if (rank == 0) {
    Write(dir + "/scratch",
          absl::StrCat(Variable("OMPI_FILE_LOCATION"), "\n",
                       Variable("OMPI_MCA_btl_vader_backing_directory"), "\n", getppid()));
  }
  Write(absl::StrCat(dir, "/rank", rank), absl::StrCat(getpid()));
}

ProgramUnderTest::ProgramUnderTest(const std::string& program,
                                   const std::vector<std::string>& flags,
                                   const std::map<std::string, std::string>& variables) {
  static int count = 0;
  dir_ = absl::StrCat(::testing::TempDir(), "/run", getpid(), ".", ++count, ".end");
  fs::create_directories(dir_);
  std::vector<std::string> words = {fs::absolute(program), absl::StrCat("--dir=", dir_)};
  words.insert(words.end(), flags.begin(), flags.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    dup2(open((dir_ + "/out").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), STDOUT_FILENO);
    dup2(open((dir_ + "/err").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), STDERR_FILENO);
    for (const auto& [name, value] : variables) {
      setenv(name.c_str(), value.c_str(), /*overwrite=*/1);
    }
    signal(SIGINT, SIG_DFL);
    execv(argv[0], argv.data());
    _exit(126);
  }
}

ProgramUnderTest::~ProgramUnderTest() {
  for (const std::string& words : ProcessesWith(dir_)) ADD_FAILURE() << "left: " << words;
  fs::remove_all(dir_);
}

bool ProgramUnderTest::Started(int ranks) const {
  return Eventually([&] {
    for (int rank = 0; rank < ranks; ++rank) {
      if (!fs::exists(absl::StrCat(dir_, "/rank", rank))) return false;
    }
    return true;
  });
}

void ProgramUnderTest::Kill(int signal) const { kill(pid_, signal); }

void ProgramUnderTest::KillRank(int rank, int signal) const {
  kill(std::stoi(ReadFile(absl::StrCat(dir_, "/rank", rank))), signal);
}

pid_t ProgramUnderTest::mpirun() const { return std::stoi(Scratch()[2]); }

int ProgramUnderTest::Wait() {
  int status = 0;
  if (!Eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; })) return -1000;
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

void ProgramUnderTest::ExpectNothingLeft() const {
  EXPECT_TRUE(Eventually([&] { return ProcessesWith(dir_).empty(); }));
  const std::string session = Scratch()[0].substr(0, std::string("/tmp/lockstep.XXXXXX").size());
  EXPECT_TRUE(absl::StartsWith(session, "/tmp/lockstep.")) << session;
  EXPECT_TRUE(Eventually([&] { return !fs::exists(session); })) << session;
  EXPECT_TRUE(absl::StartsWith(Scratch()[1], "/dev/shm/lockstep.")) << Scratch()[1];
  EXPECT_TRUE(Eventually([&] { return !fs::exists(Scratch()[1]); })) << Scratch()[1];
}

std::string ProgramUnderTest::Out() const { return ReadFile(dir_ + "/out"); }

std::string ProgramUnderTest::Err() const { return ReadFile(dir_ + "/err"); }

std::vector<std::string> ProgramUnderTest::SortedLines() const {
  std::vector<std::string> lines = absl::StrSplit(Out(), '\n', absl::SkipEmpty());
  std::sort(lines.begin(), lines.end());
  return lines;
}

std::vector<std::string> ProgramUnderTest::Scratch() const {
  return absl::StrSplit(ReadFile(dir_ + "/scratch"), '\n');
}

}  // namespace lockstep::launch::testing

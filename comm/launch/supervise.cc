#include "lockstep/comm/launch/supervise.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>

#include "lockstep/comm/launch/banner_filter.h"

namespace lockstep::launch {
namespace {

using Clock = std::chrono::steady_clock;

// For ranks to save a checkpoint. mpirun, told to end, gives them one second and then kills them.
constexpr auto kTimeToSave = std::chrono::seconds(10);
constexpr auto kTimeToEnd = std::chrono::seconds(5);  // for mpirun
constexpr int kEndingSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};

int StatusCode(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

// The signals that end a run, less those that this process was told to ignore (nohup), and SIGCHLD.
sigset_t HandledSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  for (const int signal : kEndingSignals) {
    struct sigaction action;
    sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&set, signal);
  }
  return set;
}

void WriteAll(int fd, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = write(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) return;
    if (count > 0) done += count;
  }
}

// Those of `process`, adopted ones too, by a walk through /proc.
std::vector<pid_t> ChildrenOf(pid_t process) {
  std::vector<pid_t> children;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0) continue;
    std::ifstream file(entry.path() / "stat");
    std::string text;
    std::getline(file, text);
    const size_t name_end = text.rfind(')');  // the name may hold anything
    int parent = 0;
    if (name_end != std::string::npos &&
        std::sscanf(text.c_str() + name_end, ") %*c %d", &parent) == 1 && parent == process) {
      children.push_back(pid);
    }
  }
  return children;
}

// Waits until this process has no child any more, and kills those that are left at `deadline`.
void EndChildren(Clock::time_point deadline) {
  while (true) {
    const pid_t pid = waitpid(-1, nullptr, WNOHANG);
    if (pid < 0 && errno == ECHILD) return;
    if (pid != 0) continue;
    if (Clock::now() >= deadline) {
      for (const pid_t child : ChildrenOf(getpid())) kill(child, SIGKILL);
    }
    usleep(5000);
  }
}

void RemoveScratch(const Command& command) {
  std::error_code ignored;
  for (const std::string& folder : command.scratch) std::filesystem::remove_all(folder, ignored);
}

std::vector<char*> Pointers(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const std::string& s : strings) pointers.push_back(const_cast<char*>(s.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// The middle one of the three processes.
class Guardian {
 public:
  Guardian(const Command& command, const sigset_t& original, const sigset_t& handled)
      : command_(command), original_(original), handled_(handled) {}

  int Run() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return Fail("pipe");
    leader_ = fork();
    if (leader_ < 0) return Fail("fork");
    if (leader_ == 0) Execute(ends[1]);
    close(ends[1]);
    signal(SIGPIPE, SIG_IGN);  // whoever read our output is gone: clean up all the same
    pipe_ = ends[0];
    signals_ = signalfd(-1, &handled_, SFD_CLOEXEC | SFD_NONBLOCK);
    while (!status_) {
      Wait();
      if (deadline_ && Clock::now() >= *deadline_) EndLeader();
    }
    EndChildren(Clock::now());
    while (CopyOutput()) {
    }
    WriteAll(STDERR_FILENO, filter_.Finish());
    if (WIFSIGNALED(*status_) && !deadline_) {
      std::fprintf(stderr, "%s was killed by signal %d (%s)\n", command_.arguments[0].c_str(),
                   WTERMSIG(*status_), strsignal(WTERMSIG(*status_)));
    }
    RemoveScratch(command_);
    return StatusCode(*status_);
  }

 private:
  int Fail(const char* what) {
    std::fprintf(stderr, "%s failed: %s\n", what, std::strerror(errno));
    RemoveScratch(command_);
    return 1;
  }

  [[noreturn]] void Execute(int error_output) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    setpgid(0, 0);
    signal(SIGTTOU, SIG_IGN);  // or `stty tostop` would stop the ranks when they print
    const int input = open("/dev/null", O_RDONLY);
    dup2(input, STDIN_FILENO);
    std::vector<char*> arguments = Pointers(command_.arguments);
    std::vector<char*> environment = Pointers(command_.environment);
    dup2(error_output, STDERR_FILENO);
    sigprocmask(SIG_SETMASK, &original_, nullptr);
    execve(arguments[0], arguments.data(), environment.data());
    std::fprintf(stderr, "%s: %s\n", arguments[0], std::strerror(errno));
    _exit(127);
  }

  // One round: output, signals, or a tenth of a second.
  void Wait() {
    pollfd files[] = {{signals_, POLLIN, 0}, {pipe_, POLLIN, 0}};
    const int kinds = pipe_open_ ? 2 : 1;
    poll(files, kinds, /*timeout=*/100);
    if (kinds == 2 && files[1].revents != 0) pipe_open_ = CopyOutput();
    signalfd_siginfo info;
    while (read(signals_, &info, sizeof(info)) == sizeof(info)) {
      if (info.ssi_signo == SIGCHLD) {
        Reap();
      } else if (deadline_) {
        kill(leader_, SIGKILL);
      } else {
        EndRanks();
      }
    }
  }

  // Not by way of mpirun, which would leave them no time.
  void EndRanks() {
    const std::vector<pid_t> ranks = ChildrenOf(leader_);
    for (const pid_t rank : ranks) kill(rank, SIGTERM);
    deadline_ = Clock::now() + (ranks.empty() ? Clock::duration::zero() : kTimeToSave);
  }

  void EndLeader() {
    kill(leader_, told_leader_ ? SIGKILL : SIGTERM);
    told_leader_ = true;
    deadline_ = Clock::now() + kTimeToEnd;
  }

  void Reap() {
    int status = 0;
    for (pid_t pid = waitpid(-1, &status, WNOHANG); pid > 0; pid = waitpid(-1, &status, WNOHANG)) {
      if (pid == leader_) status_ = status;
    }
  }

  bool CopyOutput() {
    char buffer[4096];
    const ssize_t count = read(pipe_, buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) return true;
    if (count <= 0) return false;
    WriteAll(STDERR_FILENO, filter_.Add(std::string(buffer, count)));
    return true;
  }

  const Command& command_;
  const sigset_t original_;
  const sigset_t handled_;
  pid_t leader_ = 0;
  int pipe_ = -1;
  int signals_ = -1;
  bool pipe_open_ = true;
  BannerFilter filter_;
  std::optional<int> status_;
  std::optional<Clock::time_point> deadline_;  // for the next step, once we were told to end
  bool told_leader_ = false;
};

}  // namespace

int Supervise(const Command& command) {
  const pid_t self = getpid();
  const sigset_t handled = HandledSignals();
  sigset_t original;
  sigprocmask(SIG_BLOCK, &handled, &original);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // adopts the command if the guardian is killed
  const pid_t guardian = fork();
  if (guardian < 0) {
    std::fprintf(stderr, "fork failed: %s\n", std::strerror(errno));
    RemoveScratch(command);
    return 1;
  }
  if (guardian == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    setpgid(0, 0);  // Ctrl-C reaches the parent alone, which passes it on
    if (getppid() != self) raise(SIGTERM);
    const int status = Guardian(command, original, handled).Run();
    std::fflush(nullptr);
    _exit(status);
  }

  std::optional<int> ended_by;
  int status = 0;
  while (true) {
    const int signal = sigwaitinfo(&handled, nullptr);
    if (signal == SIGCHLD) {
      if (waitpid(guardian, &status, WNOHANG) == guardian) break;
    } else if (signal > 0) {
      if (!ended_by) ended_by = signal;
      kill(guardian, SIGTERM);
    }
  }
  if (WIFSIGNALED(status)) {
    std::fprintf(stderr, "the process that guards the ranks was killed by signal %d (%s)\n",
                 WTERMSIG(status), strsignal(WTERMSIG(status)));
    EndChildren(Clock::now() + kTimeToEnd);
    RemoveScratch(command);
  }
  return ended_by ? 128 + *ended_by : StatusCode(status);
}

}  // namespace lockstep::launch

#include "lockstep/tutorials/common/subprocess.h"

#include <fcntl.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace lockstep::tutorials {
namespace {

std::string TemporaryFile() {
  const char* folder = std::getenv("TEST_TMPDIR");
  std::string name = std::string(folder == nullptr ? "/tmp" : folder) + "/output.XXXXXX";
  const int file = mkstemp(name.data());
  if (file < 0) throw std::runtime_error("cannot make " + name);
  close(file);
  return name;
}

std::string TakeFile(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  unlink(path.c_str());
  return text.str();
}

// Until the last process that has the other end closes it.
std::string ReadAll(int fd) {
  std::string text;
  char buffer[4096];
  for (ssize_t count = read(fd, buffer, sizeof(buffer)); count > 0;
       count = read(fd, buffer, sizeof(buffer))) {
    text.append(buffer, count);
  }
  return text;
}

}  // namespace

Outcome RunProgram(std::vector<std::string> words, const RunOptions& options) {
  const std::string out = TemporaryFile();
  const std::string err = TemporaryFile();
  int terminal = -1;
  int program_side = -1;
  if (options.terminal && openpty(&terminal, &program_side, nullptr, nullptr, nullptr) != 0) {
    throw std::runtime_error("no pseudo terminal to be had");
  }
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  const pid_t pid = fork();
  if (pid < 0) throw std::runtime_error("fork failed");
  if (pid == 0) {
    dup2(open(out.c_str(), O_WRONLY | O_APPEND), STDOUT_FILENO);
    dup2(options.terminal ? program_side : open(err.c_str(), O_WRONLY | O_APPEND), STDERR_FILENO);
    if (options.terminal) {
      close(terminal);
      close(program_side);
    }
    for (const auto& [name, value] : options.environment) {
      setenv(name.c_str(), value.c_str(), /*overwrite=*/1);
    }
    execv(argv[0], argv.data());
    _exit(126);
  }

  Outcome outcome;
  if (options.terminal) {
    close(program_side);
    outcome.err = ReadAll(terminal);
    close(terminal);
  }
  int status = 0;
  waitpid(pid, &status, /*options=*/0);
  outcome.exit_status = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  outcome.out = TakeFile(out);
  outcome.err += TakeFile(err);
  return outcome;
}

}  // namespace lockstep::tutorials

#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace lockstep::launch::testing {

// Runs a program that starts ranks of itself (RelaunchIfAlone), in the background and with its
// output in files, for tests that do things to it:
//
//   ProgramUnderTest program("comm/mpi/mpi_fault_program", {"--ranks=3"});
//   ASSERT_TRUE(program.Started(3));
//   program.KillRank(1, SIGKILL);
//   EXPECT_EQ(program.Wait(), 137);
//   program.ExpectNothingLeft();
//
// The program gets --dir=DIR as its first argument. Its ranks write the files DIR/rankR with their
// process ids, and rank 0 DIR/scratch, with OMPI_FILE_LOCATION, the folder of Open MPI's shared
// memory and the process id of mpirun, a line each (see WriteScratch).
class ProgramUnderTest {
 public:
  ProgramUnderTest(const std::string& program, const std::vector<std::string>& flags,
                   const std::map<std::string, std::string>& variables = {});

  // Fails the test if a process of the program is left.
  ~ProgramUnderTest();

  // Waits until all ranks have written their file; false where they do not.
  bool Started(int ranks) const;

  void Kill(int signal) const;
  void KillRank(int rank, int signal) const;
  pid_t mpirun() const;

  // The exit status, or minus the signal that ended the program; -1000 where it does not end.
  int Wait();

  // That no process and no file is left, now or, where the first process was killed, soon.
  void ExpectNothingLeft() const;

  std::string dir() const { return dir_; }
  std::string Out() const;
  std::string Err() const;
  std::vector<std::string> SortedLines() const;  // of Out()

 private:
  std::vector<std::string> Scratch() const;

  std::string dir_;
  pid_t pid_ = 0;
};

std::string ReadFile(const std::string& path);

// Whether the condition comes true within a minute.
bool Eventually(const std::function<bool()>& condition);

// What a program under test writes into `dir`, once it has come so far that it may be killed.
void WriteScratch(const std::string& dir, int rank);

}  // namespace lockstep::launch::testing

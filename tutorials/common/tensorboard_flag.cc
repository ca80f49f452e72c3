#include "lockstep/tutorials/common/tensorboard_flag.h"

#include <unistd.h>

#include <fstream>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/clock.h"

ABSL_FLAG(std::string, tensorboard, "",
          "folder to write curves of the training to, for TensorBoard; none: write none");

namespace lockstep::tutorials {
namespace {

double ResidentMebibytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t pages = 0;
  statm >> pages >> pages;  // the second number
  return static_cast<double>(pages * sysconf(_SC_PAGESIZE)) / (1 << 20);
}

}  // namespace

TensorBoard::TensorBoard(int rank)
    : TensorBoard(rank == 0 ? absl::GetFlag(FLAGS_tensorboard) : std::string()) {}

TensorBoard TensorBoard::OfEachRank(int rank) {
  const std::string folder = absl::GetFlag(FLAGS_tensorboard);
  return TensorBoard(folder.empty() ? folder : absl::StrCat(folder, "/rank", rank));
}

TensorBoard::TensorBoard(const std::string& folder) : last_(trace::SteadyNow()) {
  if (!folder.empty()) file_ = ValueOrThrow(trace::EventFile::Create(folder));
}

void TensorBoard::Step(int64_t step, double loss, int64_t samples) {
  if (file_ == nullptr) return;
  const absl::Duration now = trace::SteadyNow();
  Add("train/loss", step, loss);
  Add("train/samples_per_second", step,
      static_cast<double>(samples) / absl::ToDoubleSeconds(now - last_));
  Add("memory/resident_mib", step, ResidentMebibytes());
  last_ = now;
}

void TensorBoard::Test(int64_t step, double loss, double accuracy) {
  if (file_ == nullptr) return;
  Add("test/loss", step, loss);
  Add("test/accuracy", step, accuracy);
  last_ = trace::SteadyNow();
}

void TensorBoard::Add(const char* tag, int64_t step, double value) {
  ThrowIfError(file_->Add(tag, step, value));
}

}  // namespace lockstep::tutorials

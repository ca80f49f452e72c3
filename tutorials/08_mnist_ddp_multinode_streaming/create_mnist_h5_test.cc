#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lockstep/data/hdf5/hdf5.h"
#include "lockstep/data/mnist/mnist.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/subprocess.h"

extern char** environ;

namespace lockstep::tutorials {
namespace {

namespace fs = std::filesystem;

constexpr char kProgram[] = "tutorials/08_mnist_ddp_multinode_streaming/create_mnist_h5";
constexpr int64_t kImages = 137;

std::string BigEndian(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16),
          static_cast<char>(value >> 8), static_cast<char>(value)};
}

// A folder with files as those of MNIST, of `count` images of noise.
std::string DataFolder(const std::string& name, uint32_t count) {
  const fs::path folder = fs::path(testing::TempDir()) / "idx";
  fs::create_directories(folder);
  std::string images = BigEndian(0x803) + BigEndian(count) + BigEndian(28) + BigEndian(28);
  std::string labels = BigEndian(0x801) + BigEndian(count);
  uint32_t noise = 1;
  for (uint32_t i = 0; i < count; ++i) {
    labels += static_cast<char>(i % 10);
    for (int p = 0; p < 784; ++p) {
      noise = noise * 1664525 + 1013904223;
      images += static_cast<char>(noise >> 26);
    }
  }
  std::ofstream(folder / (name + "-images-idx3-ubyte"), std::ios::binary) << images;
  std::ofstream(folder / (name + "-labels-idx1-ubyte"), std::ios::binary) << labels;
  return folder.string();
}

std::string EmptyFolder() {
  static int count = 0;
  const fs::path folder = fs::path(testing::TempDir()) / absl::StrCat("out", count++);
  fs::create_directories(folder);
  return folder.string();
}

std::vector<std::string> FilesIn(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

absl::StatusOr<std::unique_ptr<data::hdf5::Hdf5Dataset>> OpenFile(const std::string& path) {
  return data::hdf5::Open(
      {.files = {path},
       .fields = {
           {.dataset = "images", .dtype = at::kFloat, .divide_by = 255, .shape = {1, 28, 28}},
           {.dataset = "labels", .classes = 10}}});
}

TEST(CreateMnistH5, FilesHoldTheImages) {
  struct Case {
    std::vector<std::string> flags;
    int64_t copies;
    size_t chunks;
  };
  const Case cases[] = {
      {{}, 1, 1},
      {{"--chunk_rows=10"}, 1, 14},
      {{"--chunk_rows=50", "--gzip=1", "--copies=3"}, 3, 9},
      {{"--chunk_rows=64", "--gzip=9", "--shuffle_filter", "--fletcher32"}, 1, 3},
      {{"--chunk_rows=5000", "--fletcher32", "--copies=2"}, 2, 1},
  };
  const std::string data = DataFolder("train", kImages);
  auto expected = ValueOrThrow(data::mnist::Open({.directory = data}));
  for (const Case& c : cases) {
    const std::string folder = EmptyFolder();
    const std::string path = folder + "/train.h5";
    std::vector<std::string> words = {kProgram, "--data=" + data, "--output=" + path};
    words.insert(words.end(), c.flags.begin(), c.flags.end());
    const Outcome outcome = RunProgram(words);
    ASSERT_EQ(outcome.exit_status, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    EXPECT_TRUE(
        absl::StartsWith(outcome.out, absl::StrCat(path, ": ", kImages * c.copies, " images, ")))
        << outcome.out;
    EXPECT_EQ(FilesIn(folder), std::vector<std::string>{"train.h5"});
    auto dataset = ValueOrThrow(OpenFile(path));
    ASSERT_EQ(dataset->size(), kImages * c.copies);
    EXPECT_EQ(dataset->chunks().size(), c.chunks);
    EXPECT_TRUE(dataset->notes().empty());
    std::vector<int64_t> rows, rows_of_one;
    for (int64_t row = 0; row < dataset->size(); ++row) {
      rows.push_back(row);
      rows_of_one.push_back(row % kImages);
    }
    data::Batch got, want;
    ASSERT_TRUE(dataset->ReadInto(rows, got).ok());
    ASSERT_TRUE(expected->ReadInto(rows_of_one, want).ok());
    EXPECT_TRUE(got["images"].equal(want["images"]));
    EXPECT_TRUE(got["labels"].equal(want["labels"]));
  }
}

TEST(CreateMnistH5, TakesTheTestImages) {
  const std::string data = DataFolder("t10k", 11);
  const std::string path = EmptyFolder() + "/test.h5";
  const Outcome outcome =
      RunProgram({kProgram, "--data=" + data, "--output=" + path, "--test_split"});
  ASSERT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_EQ(ValueOrThrow(OpenFile(path))->size(), 11);
}

// Starts it on a file that takes long, and ends it with `signal` when the file has `bytes`.
int Interrupt(const std::string& folder, int signal, uintmax_t bytes) {
  const std::string path = folder + "/train.h5";
  std::vector<std::string> words = {kProgram, "--data=" + DataFolder("train", kImages),
                                    "--output=" + path, "--copies=1000000", "--gzip=1"};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t child = -1;
  EXPECT_EQ(posix_spawn(&child, kProgram, nullptr, nullptr, argv.data(), environ), 0);
  const std::string temporary = absl::StrCat(path, ".tmp.", child);
  std::error_code none;
  for (uintmax_t size = 0; size == static_cast<uintmax_t>(-1) || size < bytes;
       size = fs::file_size(temporary, none)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    int status = 0;
    if (waitpid(child, &status, WNOHANG) != 0) {
      ADD_FAILURE() << "it ended by itself";
      return status;
    }
  }
  EXPECT_FALSE(fs::exists(path));
  kill(child, signal);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
  return WTERMSIG(status);
}

TEST(CreateMnistH5, LeavesNothingWhenInterrupted) {
  for (int signal : {SIGINT, SIGTERM}) {
    const std::string folder = EmptyFolder();
    EXPECT_EQ(Interrupt(folder, signal, /*bytes=*/300'000), signal);
    EXPECT_TRUE(FilesIn(folder).empty());
  }
}

TEST(CreateMnistH5, LeavesNoFileThatLooksWholeWhenKilled) {
  for (uintmax_t bytes : {1, 100'000, 3'000'000}) {
    const std::string folder = EmptyFolder();
    EXPECT_EQ(Interrupt(folder, SIGKILL, bytes), SIGKILL);
    const std::vector<std::string> files = FilesIn(folder);
    ASSERT_EQ(files.size(), 1);
    EXPECT_TRUE(absl::StartsWith(files[0], "train.h5.tmp."));
    EXPECT_FALSE(OpenFile(folder + "/" + files[0]).ok());
  }
}

TEST(CreateMnistH5, SaysWhatIsWrong) {
  struct Mistake {
    std::vector<std::string> flags;
    int exit_status;
    std::string told;
  };
  const std::string data = DataFolder("train", kImages);
  const std::string folder = EmptyFolder();
  const Mistake mistakes[] = {
      {{}, 1, "name the file to write: --output=FILE.h5"},
      {{"--output=/no/such/x.h5"}, 1, "/no/such/x.h5"},
      {{"--output=" + folder}, 1, "what is there is no regular file"},
      {{"--output=" + folder + "/x.h5", "--gzip=12"}, 1, "must be from 0 to 9"},
      {{"--output=" + folder + "/x.h5", "--chunk_rows=0"}, 2, "'chunk_rows'"},
      {{"--output=" + folder + "/x.h5", "--data=/nowhere"}, 1, "/nowhere"},
      {{"--output=/dev/full"}, 1, "/dev/full"},
  };
  for (const Mistake& mistake : mistakes) {
    std::vector<std::string> words = {kProgram, "--data=" + data};
    words.insert(words.end(), mistake.flags.begin(), mistake.flags.end());
    const Outcome outcome = RunProgram(words);
    EXPECT_EQ(outcome.exit_status, mistake.exit_status) << outcome.err;
    EXPECT_TRUE(absl::StartsWith(outcome.err, "create_mnist_h5: ")) << outcome.err;
    EXPECT_TRUE(absl::StrContains(outcome.err, mistake.told)) << outcome.err;
    EXPECT_EQ(outcome.err.find('\n'), outcome.err.size() - 1) << outcome.err;
  }
  EXPECT_TRUE(FilesIn(folder).empty());
}

}  // namespace
}  // namespace lockstep::tutorials

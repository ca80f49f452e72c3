// Damages small files in many ways, and reads each in a child process: that must end with an error
// or with the right data. libhdf5 itself crashes on some of them, which is counted apart.
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "lockstep/data/hdf5/hdf5.h"
#include "lockstep/data/hdf5/test_files.h"

namespace lockstep::data::hdf5 {
namespace {

constexpr int64_t kRows = 100;
constexpr int64_t kValues = 30;
constexpr unsigned kSecondsToHang = 60;

// How a child ends. None is a status that a sanitizer or the C library uses.
enum Ending { kRight = 40, kError, kWrong, kCrashInHdf5, kCrashElsewhere, kHang };

int Variants() { return std::getenv("LOCKSTEP_SOAK") != nullptr ? 10'000 : 500; }

// Which library crashed: the innermost frame that is neither the C library's nor this handler's.
void OnCrash(int) {
  std::array<void*, 64> frames;
  const int count = backtrace(frames.data(), frames.size());
  // 0 is this function, and 1 the kernel's trampoline.
  for (int i = 2; i < count; ++i) {
    Dl_info info;
    if (dladdr(frames[i], &info) == 0 || info.dli_fname == nullptr) continue;
    if (std::strstr(info.dli_fname, "libhdf5") != nullptr) _exit(kCrashInHdf5);
    if (std::strstr(info.dli_fname, "libc.") == nullptr) _exit(kCrashElsewhere);
  }
  _exit(kCrashElsewhere);
}

void OnAlarm(int) { _exit(kHang); }

Ending Read(const std::string& path, bool check_in_child) {
  const auto dataset = Open({.files = {path},
                             .fields = {{.dataset = "images"}, {.dataset = "labels"}},
                             .decode_threads = 2,
                             .check_in_child = check_in_child});
  if (!dataset.ok()) return kError;
  if ((*dataset)->size() != kRows) return kWrong;
  const auto reader = (*dataset)->ReadInOrder(RangeOrder({0, kRows}));
  Batch batch;
  for (int64_t row = 0; row < kRows; row += 20) {
    if (!reader->ReadInto(20, batch).ok()) return kError;
    if (batch["images"].scalar_type() != at::kShort || batch["images"].numel() != 20 * kValues ||
        batch["labels"].scalar_type() != at::kByte || batch["labels"].numel() != 20) {
      return kWrong;
    }
    for (int64_t i = 0; i < 20; ++i) {
      for (int64_t e = 0; e < kValues; ++e) {
        if (batch["images"].const_data_ptr<int16_t>()[i * kValues + e] != Value(row + i, e)) {
          return kWrong;
        }
      }
      if (batch["labels"].const_data_ptr<uint8_t>()[i] != Value(row + i, 0)) return kWrong;
    }
  }
  return kRight;
}

// Runs `body` in a child process; this process has no threads, and has not used HDF5.
template <typename Body>
int InChild(Body body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    void* warm[1];
    backtrace(warm, 1);  // loads what it needs, which a signal handler must not
    for (int crash : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL}) signal(crash, OnCrash);
    signal(SIGALRM, OnAlarm);
    alarm(kSecondsToHang);
    if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(1);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

struct Original {
  std::string name;
  bool checked_metadata;  // a checksum covers every byte that matters
  std::string bytes;
  std::vector<std::pair<size_t, size_t>> chunks;  // where their bytes are: offset, count
};

// Where the chunks of a file are, from HDF5, in a child.
std::vector<std::pair<size_t, size_t>> ChunksOf(const std::string& path) {
  const std::string list = path + ".chunks";
  InChild([&] {
    const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
    std::string text;
    for (const char* name : {"images", "labels"}) {
      const hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT);
      const hid_t space = H5Dget_space(dataset);
      hsize_t count = 0;
      H5Dget_num_chunks(dataset, space, &count);
      for (hsize_t i = 0; i < count; ++i) {
        hsize_t start[2], bytes = 0;
        haddr_t offset = 0;
        unsigned skipped = 0;
        H5Dget_chunk_info(dataset, space, i, start, &skipped, &offset, &bytes);
        absl::StrAppend(&text, offset, " ", bytes, "\n");
      }
    }
    WriteFile(list, text);
    return 0;
  });
  std::vector<std::pair<size_t, size_t>> chunks;
  FILE* lines = std::fopen(list.c_str(), "r");
  size_t offset = 0, bytes = 0;
  while (std::fscanf(lines, "%zu %zu", &offset, &bytes) == 2) chunks.emplace_back(offset, bytes);
  std::fclose(lines);
  return chunks;
}

std::vector<Original> Originals() {
  const auto images = [](int gzip, bool shuffle) -> TestDataset {
    return {.type = H5T_STD_I16LE,
            .sizes = {kRows, kValues},
            .chunk = {9, kValues},
            .gzip = gzip,
            .shuffle = shuffle,
            .fletcher32 = true};
  };
  const auto labels = [](int gzip) -> TestDataset {
    return {.name = "labels", .sizes = {kRows}, .chunk = {40}, .gzip = gzip, .fletcher32 = true};
  };
  std::vector<Original> originals;
  const std::string folder = TemporaryPath("");
  for (bool latest : {false, true}) {
    for (int gzip : {0, 6}) {
      const std::string name = absl::StrCat("gzip", gzip, latest ? "latest" : "old");
      const std::string path = folder + name + ".h5";
      InChild([&] {
        const std::string made = MakeFile("x.h5", {images(gzip, gzip > 0), labels(gzip)}, latest);
        return std::rename(made.c_str(), path.c_str());
      });
      originals.push_back({name, latest, ReadFile(path), ChunksOf(path)});
    }
  }
  return originals;
}

struct Variant {
  std::string bytes;
  bool only_chunks = false;  // only bytes of chunks are changed
  bool truncated = false;
};

Variant Damage(const Original& original, std::mt19937_64& random) {
  Variant variant = {original.bytes};
  const auto kind = random() % 4;
  if (kind == 0) {
    variant.bytes.resize(random() % original.bytes.size());
    variant.truncated = true;
    return variant;
  }
  variant.only_chunks = kind == 1;
  const size_t flips = 1 + random() % 8;
  for (size_t i = 0; i < flips; ++i) {
    size_t at = random() % original.bytes.size();
    if (variant.only_chunks) {
      const auto& [offset, bytes] = original.chunks[random() % original.chunks.size()];
      at = offset + random() % bytes;
    }
    variant.bytes[at] = static_cast<char>(variant.bytes[at] ^ (1 + random() % 255));
  }
  return variant;
}

TEST(Hdf5Corruption, AnErrorOrTheRightDataAndNothingElse) {
  const std::vector<Original> originals = Originals();
  const std::string path = TemporaryPath("damaged.h5");
  for (const Original& original : originals) {
    ASSERT_FALSE(original.chunks.empty());
    WriteFile(path, original.bytes);
    for (bool check_in_child : {false, true}) {
      ASSERT_EQ(InChild([&] { return Read(path, check_in_child); }), kRight) << original.name;
    }
  }
  std::mt19937_64 random(35);
  std::map<int, int> endings;
  for (int i = 0; i < Variants(); ++i) {
    const Original& original = originals[i % originals.size()];
    const Variant variant = Damage(original, random);
    WriteFile(path, variant.bytes);
    const int ending = InChild([&] { return Read(path, /*check_in_child=*/false); });
    ++endings[ending];
    const std::string what = absl::StrCat("variant ", i, " of ", original.name);
    if (ending == kCrashInHdf5) {
      // What would have ended a training run is an error when a child looks first.
      EXPECT_EQ(InChild([&] { return Read(path, /*check_in_child=*/true); }), kError) << what;
      continue;
    }
    EXPECT_TRUE(ending == kRight || ending == kError || ending == kWrong)
        << what << " ended with " << ending;
    if (variant.truncated) {
      EXPECT_EQ(ending, kError) << what;
    }
    if (variant.only_chunks || original.checked_metadata) {
      EXPECT_NE(ending, kWrong) << what;
    }
  }
  std::printf(
      "%d variants: %d errors, %d right, %d wrong where no checksum is, %d crashes of libhdf5\n",
      Variants(), endings[kError], endings[kRight], endings[kWrong], endings[kCrashInHdf5]);
  EXPECT_GT(endings[kError], Variants() / 2);
  EXPECT_LE(endings[kCrashInHdf5], Variants() / 50);
}

}  // namespace
}  // namespace lockstep::data::hdf5

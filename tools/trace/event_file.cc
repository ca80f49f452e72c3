#include "lockstep/tools/trace/event_file.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace lockstep::trace {
namespace {

constexpr std::array<uint32_t, 256> kCrcTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78U : 0);
    table[byte] = crc;
  }
  return table;
}();

// Little endian, as both formats want it.
template <typename T>
void AppendFixed(std::string& to, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) to += static_cast<char>((value >> (8 * i)) & 0xff);
}

void AppendVarint(std::string& to, uint64_t value) {
  for (; value >= 0x80; value >>= 7) to += static_cast<char>((value & 0x7f) | 0x80);
  to += static_cast<char>(value);
}

enum class Wire : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void AppendKey(std::string& to, int field, Wire wire) {
  AppendVarint(to, static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire));
}

void AppendBytes(std::string& to, int field, std::string_view bytes) {
  AppendKey(to, field, Wire::kBytes);
  AppendVarint(to, bytes.size());
  to += bytes;
}

// An Event's fields 1, wall_time, and 2, step.
std::string BeginEvent(int64_t step) {
  std::string event;
  const double now = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  AppendKey(event, 1, Wire::kFixed64);
  AppendFixed(event, std::bit_cast<uint64_t>(now));
  AppendKey(event, 2, Wire::kVarint);
  AppendVarint(event, static_cast<uint64_t>(step));
  return event;
}

uint32_t MaskedCrc(std::string_view bytes) { return std::rotr(Crc32c(bytes), 15) + 0xa282ead8U; }

}  // namespace

uint32_t Crc32c(std::string_view bytes) {
  uint32_t crc = 0xffffffffU;
  for (char c : bytes) crc = (crc >> 8) ^ kCrcTable[(crc ^ static_cast<uint8_t>(c)) & 0xff];
  return ~crc;
}

absl::StatusOr<std::unique_ptr<EventFile>> EventFile::Create(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("cannot make the folder ", folder, " for TensorBoard: ", error.message()));
  }
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  std::unique_ptr<EventFile> file(
      new EventFile(absl::StrCat(folder, "/events.out.tfevents.", absl::ToUnixSeconds(absl::Now()),
                                 ".", host.data(), ".", getpid())));
  std::string event = BeginEvent(/*step=*/0);
  AppendBytes(event, 3, "brain.Event:2");  // file_version, which a file begins with
  if (absl::Status status = file->Write(event); !status.ok()) return status;
  return file;
}

EventFile::EventFile(std::string path)
    : path_(std::move(path)), out_(path_, std::ios::binary | std::ios::app) {}

absl::Status EventFile::Add(std::string_view tag, int64_t step, double value) {
  std::string scalar;
  AppendBytes(scalar, 1, tag);
  AppendKey(scalar, 2, Wire::kFixed32);  // simple_value
  AppendFixed(scalar, std::bit_cast<uint32_t>(static_cast<float>(value)));
  std::string summary;
  AppendBytes(summary, 1, scalar);
  std::string event = BeginEvent(step);
  AppendBytes(event, 5, summary);
  return Write(event);
}

absl::Status EventFile::Write(const std::string& event) {
  std::string record;
  AppendFixed(record, static_cast<uint64_t>(event.size()));
  AppendFixed(record, MaskedCrc(record));
  record += event;
  AppendFixed(record, MaskedCrc(event));
  errno = 0;
  out_ << record << std::flush;
  if (out_) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write ", path_, errno == 0 ? "" : ": ",
                                             errno == 0 ? "" : strerror(errno)));
}

}  // namespace lockstep::trace

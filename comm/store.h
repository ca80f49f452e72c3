#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace c10d {
class Store;
}

namespace lockstep::comm {

// A key-value store common to all ranks, over c10d::TCPStore. One rank serves it, the others
// connect:
//
//   auto store = rank == 0 ? Store::Serve(/*port=*/0) : Store::Connect(host, port,
//   absl::Minutes(1)); if (rank == 0) status = (*store)->Set("id", bytes);
//   absl::StatusOr<std::string> id = (*store)->Get("id", absl::Minutes(1));
//
// It is for what is small and rare: a request takes a round trip to the serving rank. It needs
// neither MPI nor a GPU, so it still answers when those do not. Keys and values are bytes.
//
// Errors: Unavailable when the serving rank cannot be reached (or has gone), DeadlineExceeded when
// a key does not appear in time; both name the address or the key. Thread-safe: no call waits for
// another, as waiting is done by asking again.
class Store {
 public:
  // Serves at `port` of all interfaces, 0 for any free one; see port().
  static absl::StatusOr<std::shared_ptr<Store>> Serve(int port);

  // Connects, trying again until `timeout` while nobody serves there.
  static absl::StatusOr<std::shared_ptr<Store>> Connect(const std::string& host, int port,
                                                        absl::Duration timeout);

  // For ranks that are threads of this process.
  static std::shared_ptr<Store> InProcess();

  // A view of this store in which every key starts with `prefix`.
  std::shared_ptr<Store> WithPrefix(const std::string& prefix) const;

  absl::Status Set(const std::string& key, const std::string& value);

  // The value of `key`, waiting for it to be set.
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout);

  // The value of `key`, or nullopt while it is not set.
  absl::StatusOr<std::optional<std::string>> TryGet(const std::string& key);

  // Adds to a counter, which starts at 0, and returns what it then is. Counters are read by
  // Add(key, 0).
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount);

  absl::Status Delete(const std::string& key);

  // The port that Serve() took; 0 for other stores.
  int port() const { return port_; }

 private:
  Store(std::shared_ptr<c10d::Store> store, std::string where, std::string prefix, int port);

  const std::shared_ptr<c10d::Store> store_;
  const std::string where_;  // for messages
  const std::string prefix_;
  const int port_;
};

}  // namespace lockstep::comm

#include "lockstep/comm/store.h"

#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace lockstep::comm {
namespace {

std::string FirstLine(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

// Runs `call` and turns what it throws into a Status.
template <typename Call>
auto Guarded(const std::string& where, Call call) -> absl::StatusOr<decltype(call())> {
  try {
    return call();
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("the store at ", where, " does not answer: ", FirstLine(error)));
  }
}

// c10d counts references inside the object; the deleter holds one.
std::shared_ptr<c10d::Store> Share(c10::intrusive_ptr<c10d::Store> store) {
  c10d::Store* raw = store.get();
  return std::shared_ptr<c10d::Store>(raw, [store = std::move(store)](c10d::Store*) {});
}

// c10d looks up the names of the addresses that it connects to, for its log: 5 seconds where the
// DNS does not answer. While this lives, this thread asks no DNS.
class NoNameLookups {
 public:
  NoNameLookups() {
    res_init();
    servers_ = std::exchange(_res.nscount, 0);
  }
  ~NoNameLookups() { _res.nscount = servers_; }
  NoNameLookups(const NoNameLookups&) = delete;
  NoNameLookups& operator=(const NoNameLookups&) = delete;

 private:
  int servers_;
};

// The first address of `host` as a number, or `host` where it has none.
std::string NumericAddress(const std::string& host) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), /*service=*/nullptr, &hints, &found) != 0) return host;
  char text[NI_MAXHOST] = "";
  const int error = getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof(text),
                                /*serv=*/nullptr, /*servlen=*/0, NI_NUMERICHOST);
  freeaddrinfo(found);
  return error == 0 ? text : host;
}

std::string ToString(const std::vector<uint8_t>& bytes) {
  return std::string(bytes.begin(), bytes.end());
}

}  // namespace

Store::Store(std::shared_ptr<c10d::Store> store, std::string where, std::string prefix, int port)
    : store_(std::move(store)), where_(std::move(where)), prefix_(std::move(prefix)), port_(port) {}

absl::StatusOr<std::shared_ptr<Store>> Store::Serve(int port) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = true;
  options.useLibUV = false;  // the libuv server looks up the name of each client: see NoNameLookups
  options.waitWorkers = false;
  try {
    const NoNameLookups guard;
    auto store = c10::make_intrusive<c10d::TCPStore>("localhost", options);
    const int bound = store->getPort();
    return std::shared_ptr<Store>(
        new Store(Share(std::move(store)), absl::StrCat("localhost:", bound), "", bound));
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve a store at port ", port, ": ", FirstLine(error)));
  }
}

absl::StatusOr<std::shared_ptr<Store>> Store::Connect(const std::string& host, int port,
                                                      absl::Duration timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.waitWorkers = false;
  options.timeout = absl::ToChronoMilliseconds(timeout);
  const std::string where = absl::StrCat(host, ":", port);
  const std::string address = NumericAddress(host);
  try {
    const NoNameLookups guard;
    return std::shared_ptr<Store>(
        new Store(Share(c10::make_intrusive<c10d::TCPStore>(address, options)), where, "", 0));
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("no store could be reached at ", where, " within ",
                                               absl::FormatDuration(timeout), ": ",
                                               FirstLine(error)));
  }
}

std::shared_ptr<Store> Store::InProcess() {
  return std::shared_ptr<Store>(
      new Store(Share(c10::make_intrusive<c10d::HashStore>()), "this process", "", 0));
}

std::shared_ptr<Store> Store::WithPrefix(const std::string& prefix) const {
  return std::shared_ptr<Store>(new Store(store_, where_, prefix_ + prefix, port_));
}

absl::Status Store::Set(const std::string& key, const std::string& value) {
  return Guarded(where_,
                 [&] {
                   store_->set(prefix_ + key, std::vector<uint8_t>(value.begin(), value.end()));
                   return true;
                 })
      .status();
}

absl::StatusOr<std::string> Store::Get(const std::string& key, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  for (absl::Duration pause = absl::Milliseconds(1);;
       pause = std::min(2 * pause, absl::Milliseconds(50))) {
    absl::StatusOr<std::optional<std::string>> value = TryGet(key);
    if (!value.ok()) return value.status();
    if (value->has_value()) return **value;
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("nobody set \"", prefix_, key,
                                                      "\" in the store at ", where_, " within ",
                                                      absl::FormatDuration(timeout)));
    }
    absl::SleepFor(pause);
  }
}

absl::StatusOr<std::optional<std::string>> Store::TryGet(const std::string& key) {
  return Guarded(where_, [&]() -> std::optional<std::string> {
    if (!store_->check({prefix_ + key})) return std::nullopt;
    return ToString(store_->get(prefix_ + key));
  });
}

absl::StatusOr<int64_t> Store::Add(const std::string& key, int64_t amount) {
  return Guarded(where_, [&] { return store_->add(prefix_ + key, amount); });
}

absl::Status Store::Delete(const std::string& key) {
  return Guarded(where_, [&] { return store_->deleteKey(prefix_ + key); }).status();
}

}  // namespace lockstep::comm

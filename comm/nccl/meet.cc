#include "lockstep/comm/nccl/meet.h"

#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace lockstep::comm::nccl {
namespace {

struct Place {
  std::shared_ptr<Store> store;
  int meetings = 0;
};

// By host, port and rank. Never destroyed: other ranks may still ask a store that this one serves
// when it has no communicator any more.
struct Places {
  std::mutex mutex;
  std::map<std::tuple<std::string, int, int>, Place> by_address;
};

Places& AllPlaces() {
  static auto* const places = new Places();
  return *places;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Store>> Meet(const launch::World& world, absl::Duration timeout,
                                            const launch::Environment& environment) {
  if (world.size == 1) return Store::InProcess();
  if (!world.store) {
    return absl::InvalidArgumentError(
        absl::StrCat(launch::LauncherName(world.launcher),
                     " does not say where the ranks can meet: create a communicator over MPI first "
                     "and NCCL's of that, or set MASTER_ADDR and MASTER_PORT"));
  }
  const auto [host, port] = *world.store;
  const bool agent_serves = world.launcher == launch::Launcher::kTorchrun &&
                            environment("TORCHELASTIC_USE_AGENT_STORE") == "True";
  Places& places = AllPlaces();
  Place* place = nullptr;
  {
    const std::lock_guard<std::mutex> lock(places.mutex);
    place = &places.by_address[{host, port, world.rank}];
  }
  // A rank creates its communicators one after the other, so that this is its place alone.
  if (place->store == nullptr) {
    absl::StatusOr<std::shared_ptr<Store>> store =
        world.rank == 0 && !agent_serves ? Store::Serve(port) : Store::Connect(host, port, timeout);
    if (!store.ok()) return store.status();
    place->store = *std::move(store);
  }
  // torchrun's store outlives ranks that it starts again.
  const std::string attempt = environment("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return place->store->WithPrefix(
      absl::StrCat("lockstep/nccl/", attempt, "/", place->meetings++, "/"));
}

}  // namespace lockstep::comm::nccl

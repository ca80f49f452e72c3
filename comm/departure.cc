#include "lockstep/comm/departure.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace lockstep::comm {
namespace {

// Names of communicators have slashes and numbers in them, so they come last.
std::string CountKey(const std::string& communicator) {
  return absl::StrCat("departures/", communicator);
}

std::string EntryKey(const std::string& communicator, int64_t index) {
  return absl::StrCat("departure/", index, "/", communicator);
}

uint64_t Count(const std::map<int, uint64_t>& counts, int rank) {
  const auto found = counts.find(rank);
  return found == counts.end() ? 0 : found->second;
}

// "2;17;s0=1;r1=2": the rank, its collectives, a Send to rank 0, two Recvs from rank 1.
std::string ToText(const Departure& departure) {
  std::string text = absl::StrCat(departure.rank, ";", departure.issued.collectives);
  for (const auto& [rank, count] : departure.issued.sends) {
    absl::StrAppend(&text, ";s", rank, "=", count);
  }
  for (const auto& [rank, count] : departure.issued.recvs) {
    absl::StrAppend(&text, ";r", rank, "=", count);
  }
  return text;
}

absl::StatusOr<Departure> FromText(const std::string& text) {
  const std::vector<std::string> fields = absl::StrSplit(text, ';');
  Departure departure;
  bool good = fields.size() >= 2 && absl::SimpleAtoi(fields[0], &departure.rank) &&
              absl::SimpleAtoi(fields[1], &departure.issued.collectives);
  for (size_t i = 2; good && i < fields.size(); ++i) {
    const std::vector<std::string> parts = absl::StrSplit(fields[i].substr(1), '=');
    auto& counts = fields[i][0] == 's' ? departure.issued.sends : departure.issued.recvs;
    int rank = 0;
    good = parts.size() == 2 && absl::SimpleAtoi(parts[0], &rank) &&
           absl::SimpleAtoi(parts[1], &counts[rank]);
  }
  if (good) return departure;
  return absl::InternalError(absl::StrCat("the store says of a rank that left: \"", text, "\""));
}

}  // namespace

void IssuedCounts::Add(const Operation& operation) {
  if (IsCollective(operation.kind)) {
    ++collectives;
  } else {
    ++(operation.kind == OperationKind::kSend ? sends : recvs)[operation.peer];
  }
}

bool IsDeserted(const Operation& operation, int rank, const IssuedCounts& issued,
                const Departure& departure) {
  if (IsCollective(operation.kind)) return operation.sequence > departure.issued.collectives;
  if (operation.peer != departure.rank) return false;
  // Of the transfers with that rank one at least will not end.
  return operation.kind == OperationKind::kSend
             ? Count(issued.sends, departure.rank) > Count(departure.issued.recvs, rank)
             : Count(issued.recvs, departure.rank) > Count(departure.issued.sends, rank);
}

absl::Status DesertedError(const Operation& operation, const std::string& communicator, int rank,
                           int size, const Departure& departure) {
  const uint64_t collectives = departure.issued.collectives;
  const std::string reason =
      IsCollective(operation.kind)
          ? absl::StrCat("after ", collectives, collectives == 1 ? " operation" : " operations",
                         "; all ranks must issue the same ones (uneven data? see join in "
                         "parallel/ddp)")
          : absl::StrCat("without the ", operation.kind == OperationKind::kSend ? "Recv" : "Send",
                         " that matches it");
  return absl::FailedPreconditionError(absl::StrCat(
      operation.ToString(), " of communicator ", communicator, " on rank ", rank, " of ", size,
      " cannot be completed: rank ", departure.rank, " has left the communicator ", reason));
}

absl::Status WriteDeparture(Store& store, const std::string& communicator,
                            const Departure& departure) {
  absl::StatusOr<int64_t> index = store.Add(CountKey(communicator), 1);
  if (!index.ok()) return index.status();
  return store.Set(EntryKey(communicator, *index), ToText(departure));
}

absl::Status ReadDepartures(Store& store, const std::string& communicator,
                            std::vector<Departure>& known) {
  absl::StatusOr<int64_t> count = store.Add(CountKey(communicator), 0);
  if (!count.ok()) return count.status();
  while (static_cast<int64_t>(known.size()) < *count) {
    auto entry = store.TryGet(EntryKey(communicator, static_cast<int64_t>(known.size()) + 1));
    if (!entry.ok()) return entry.status();
    if (!entry->has_value()) return absl::OkStatus();  // about to be written
    absl::StatusOr<Departure> departure = FromText(**entry);
    if (!departure.ok()) return departure.status();
    known.push_back(*std::move(departure));
  }
  return absl::OkStatus();
}

}  // namespace lockstep::comm

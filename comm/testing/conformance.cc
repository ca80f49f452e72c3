#include "lockstep/comm/testing/conformance.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <vector>

#include "absl/time/clock.h"

namespace lockstep::comm::testing {
namespace {

const at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                  at::kInt,   at::kLong,   at::kByte};
const int64_t kSizes[] = {0, 1, 3, 257, 4096 + 1};

// What rank `rank` has at `index`: 0 to 6, so that sums of 4 ranks and products of 3s stay small.
int64_t Value(int rank, int64_t index) { return (index + 3 * rank) % 7; }

// Where the tensors of this thread's rank are: its communicator's device.
thread_local at::Device t_device = at::kCPU;

at::Tensor Full(at::IntArrayRef sizes, const at::Scalar& value,
                std::optional<at::ScalarType> dtype = std::nullopt) {
  return at::full(sizes, value, at::TensorOptions(t_device).dtype(dtype));
}

at::Tensor Ones(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return Full(sizes, 1, dtype);
}

at::Tensor Zeros(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return Full(sizes, 0, dtype);
}

at::Tensor Empty(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return at::empty(sizes, at::TensorOptions(t_device).dtype(dtype));
}

// `values` of `count` elements, as a tensor of any dtype.
at::Tensor Make(int64_t count, at::ScalarType dtype, const std::function<double(int64_t)>& values) {
  at::Tensor exact = at::empty({count}, at::kDouble);
  double* data = exact.mutable_data_ptr<double>();
  for (int64_t i = 0; i < count; ++i) data[i] = values(i);
  return exact.to(dtype).to(t_device);
}

at::Tensor Mine(int rank, int64_t count, at::ScalarType dtype) {
  return Make(count, dtype, [rank](int64_t i) { return static_cast<double>(Value(rank, i)); });
}

double Combine(ReduceOp op, int size, const std::function<double(int)>& value) {
  double total = value(0);
  for (int rank = 1; rank < size; ++rank) {
    const double next = value(rank);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAverage:
        total += next;
        break;
      case ReduceOp::kMin:
        total = std::min(total, next);
        break;
      case ReduceOp::kMax:
        total = std::max(total, next);
        break;
      case ReduceOp::kProduct:
        total *= next;
        break;
    }
  }
  return op == ReduceOp::kAverage ? total / size : total;
}

// Values whose combination under `op` is exact in every dtype.
double Reducible(ReduceOp op, int size, int rank, int64_t index) {
  if (op == ReduceOp::kAverage) return static_cast<double>(Value(rank, index) * size);
  if (op == ReduceOp::kProduct) return static_cast<double>(1 + (index + rank) % 3);
  return static_cast<double>(Value(rank, index));
}

const ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                         ReduceOp::kProduct};

bool Supported(ReduceOp op, at::ScalarType dtype) {
  return op != ReduceOp::kAverage || c10::isFloatingType(dtype);
}

void ExpectEqual(const at::Tensor& found, const at::Tensor& expected, const Communicator& comm,
                 const std::string& what) {
  EXPECT_TRUE(at::equal(found, expected))
      << what << " on rank " << comm.rank() << " of " << comm.size() << ", "
      << c10::toString(found.scalar_type()) << ", " << found.numel() << " elements";
}

void ExpectOk(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }

void ExpectRefused(const Work& work, const std::string& why) {
  const absl::Status status = work.Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_NE(std::string{status.message()}.find(why), std::string::npos) << status;
}

}  // namespace

void CommunicatorConformance::Run(const std::function<void(Communicator&)>& body) {
  GetParam().run(absl::Seconds(120), [&](Communicator& comm) {
    t_device = comm.device();
    body(comm);
  });
}

TEST_P(CommunicatorConformance, KnowsItself) {
  Run([](Communicator& comm) {
    EXPECT_GE(comm.rank(), 0);
    EXPECT_LT(comm.rank(), comm.size());
    EXPECT_EQ(comm.name(), "world");
  });
}

TEST_P(CommunicatorConformance, AllReducesEveryDtypeAndOp) {
  Run([](Communicator& comm) {
    for (at::ScalarType dtype : kDtypes) {
      for (ReduceOp op : kOps) {
        if (!Supported(op, dtype)) continue;
        for (int64_t count : kSizes) {
          const auto value = [&](int rank, int64_t i) {
            return Reducible(op, comm.size(), rank, i);
          };
          at::Tensor x = Make(count, dtype, [&](int64_t i) { return value(comm.rank(), i); });
          ExpectOk(comm.AllReduce(x, op).Wait());
          ExpectEqual(x,
                      Make(count, dtype,
                           [&](int64_t i) {
                             return Combine(op, comm.size(),
                                            [&](int rank) { return value(rank, i); });
                           }),
                      comm, std::string("AllReduce ") + Name(op));
        }
      }
    }
  });
}

TEST_P(CommunicatorConformance, ReduceScattersEveryDtypeAndOp) {
  Run([](Communicator& comm) {
    for (at::ScalarType dtype : kDtypes) {
      for (ReduceOp op : kOps) {
        if (!Supported(op, dtype)) continue;
        for (int64_t count : kSizes) {
          for (bool in_place : {false, true}) {
            const auto value = [&](int rank, int64_t i) {
              return Reducible(op, comm.size(), rank, i);
            };
            at::Tensor in =
                Make(count * comm.size(), dtype, [&](int64_t i) { return value(comm.rank(), i); });
            at::Tensor out =
                in_place ? in.narrow(0, comm.rank() * count, count) : Empty({count}, dtype);
            ExpectOk(comm.ReduceScatterInto(out, in, op).Wait());
            ExpectEqual(out,
                        Make(count, dtype,
                             [&](int64_t i) {
                               return Combine(op, comm.size(), [&](int rank) {
                                 return value(rank, comm.rank() * count + i);
                               });
                             }),
                        comm, std::string("ReduceScatter ") + Name(op));
          }
        }
      }
    }
  });
}

TEST_P(CommunicatorConformance, AllGathersAndGathers) {
  Run([](Communicator& comm) {
    for (at::ScalarType dtype : kDtypes) {
      for (int64_t count : kSizes) {
        for (bool in_place : {false, true}) {
          const at::Tensor expected = Make(count * comm.size(), dtype, [&](int64_t i) {
            return static_cast<double>(Value(static_cast<int>(i / count), i % count));
          });
          at::Tensor out = Zeros({count * comm.size()}, dtype);
          at::Tensor in = Mine(comm.rank(), count, dtype);
          if (in_place) in = out.narrow(0, comm.rank() * count, count).copy_(in);
          ExpectOk(comm.AllGatherInto(out, in).Wait());
          ExpectEqual(out, expected, comm, "AllGather");
          for (int root = 0; root < comm.size(); ++root) {
            at::Tensor gathered;
            if (root == comm.rank()) gathered = Zeros({count * comm.size()}, dtype);
            at::Tensor mine = Mine(comm.rank(), count, dtype);
            if (in_place && root == comm.rank()) {
              mine = gathered.narrow(0, comm.rank() * count, count).copy_(mine);
            }
            ExpectOk(comm.GatherInto(gathered, mine, root).Wait());
            if (root == comm.rank()) ExpectEqual(gathered, expected, comm, "Gather");
          }
        }
      }
    }
  });
}

TEST_P(CommunicatorConformance, BroadcastsFromEveryRoot) {
  Run([](Communicator& comm) {
    for (at::ScalarType dtype : kDtypes) {
      for (int64_t count : kSizes) {
        for (int root = 0; root < comm.size(); ++root) {
          at::Tensor x = Mine(comm.rank(), count, dtype);
          ExpectOk(comm.Broadcast(x, root).Wait());
          ExpectEqual(x, Mine(root, count, dtype), comm, "Broadcast");
        }
      }
    }
  });
}

TEST_P(CommunicatorConformance, ExchangesAllToAll) {
  Run([](Communicator& comm) {
    for (at::ScalarType dtype : kDtypes) {
      for (int64_t count : kSizes) {
        const auto value = [&](int from, int to, int64_t i) {
          return static_cast<double>(Value(from + 2 * to, i));
        };
        at::Tensor in = Make(count * comm.size(), dtype, [&](int64_t i) {
          return value(comm.rank(), static_cast<int>(i / count), i % count);
        });
        at::Tensor out = Empty({count * comm.size()}, dtype);
        ExpectOk(comm.AllToAll(out, in).Wait());
        ExpectEqual(out,
                    Make(count * comm.size(), dtype,
                         [&](int64_t i) {
                           return value(static_cast<int>(i / count), comm.rank(), i % count);
                         }),
                    comm, "AllToAll");
      }
    }
  });
}

TEST_P(CommunicatorConformance, TakesAnyShape) {
  Run([](Communicator& comm) {
    at::Tensor x = Ones({2, 3, 5});
    ExpectOk(comm.AllReduce(x, ReduceOp::kSum).Wait());
    ExpectEqual(x, Full({2, 3, 5}, comm.size(), at::kFloat), comm, "AllReduce");
    at::Tensor scalar = Ones({});
    ExpectOk(comm.AllReduce(scalar, ReduceOp::kSum).Wait());
    ExpectEqual(scalar, Full({}, comm.size(), at::kFloat), comm, "AllReduce");
    at::Tensor leaf = Ones({4}).requires_grad_();
    ExpectOk(comm.AllReduce(leaf, ReduceOp::kSum).Wait());
    ExpectEqual(leaf.detach(), Full({4}, comm.size(), at::kFloat), comm, "AllReduce");
  });
}

TEST_P(CommunicatorConformance, AllRanksGetTheSameBits) {
  Run([](Communicator& comm) {
    at::Tensor x = Make(1025, at::kFloat, [&](int64_t i) {
      return 1.0 / (1 + static_cast<double>(i) + 0.37 * comm.rank());
    });
    ExpectOk(comm.AllReduce(x, ReduceOp::kAverage).Wait());
    at::Tensor root = x.clone();
    ExpectOk(comm.Broadcast(root, 0).Wait());
    ExpectEqual(x, root, comm, "AllReduce");
  });
}

TEST_P(CommunicatorConformance, ManyAreInFlightAndMayBeDropped) {
  Run([](Communicator& comm) {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 50; ++i) {
      tensors.push_back(Full({i * 13}, i, at::kLong));
      works.push_back(comm.AllReduce(tensors.back(), ReduceOp::kSum));
    }
    // Dropped, with its tensor: the backend keeps both.
    static_cast<void>(comm.AllReduce(Ones({1000}), ReduceOp::kSum));
    for (int i = 49; i >= 0; --i) {
      ExpectOk(works[i].Wait());
      ExpectOk(works[i].Wait());
      EXPECT_TRUE(works[i].IsDone() || !t_device.is_cpu());  // else only the stream has waited
      ExpectEqual(tensors[i], Full({i * 13}, i * comm.size(), at::kLong), comm, "AllReduce");
    }
    ExpectOk(comm.Barrier().Wait());
  });
}

TEST_P(CommunicatorConformance, SendsAndRecvsInAnyOrder) {
  Run([](Communicator& comm) {
    const int next = (comm.rank() + 1) % comm.size();
    const int previous = (comm.rank() + comm.size() - 1) % comm.size();
    for (int64_t count : kSizes) {
      for (bool send_first : {true, false}) {
        at::Tensor in = Mine(comm.rank(), count, at::kFloat);
        at::Tensor out = Empty({count});
        Work sent, received;
        if (send_first) sent = comm.Send(in, next);
        received = comm.Recv(out, previous);
        if (!send_first) sent = comm.Send(in, next);
        ExpectOk(sent.Wait());
        ExpectOk(received.Wait());
        ExpectEqual(out, Mine(previous, count, at::kFloat), comm, "Recv");
      }
    }
  });
}

TEST_P(CommunicatorConformance, IssuingACollectiveWaitsForNoRank) {
  if (std::getenv("LOCKSTEP_COMM_DEBUG") != nullptr) GTEST_SKIP() << "it compares them first";
  Run([](Communicator& comm) {
    if (comm.size() == 1) return;
    at::Tensor sum = Full({8}, 1, at::kFloat);
    at::Tensor sent = Full({3}, 5, at::kFloat);
    Work reduced;
    if (comm.rank() == 0) {
      reduced = comm.AllReduce(sum, ReduceOp::kSum);
      ExpectOk(comm.Send(sent, 1).Wait());
    } else {
      at::Tensor received = Full({3}, 0, at::kFloat);
      if (comm.rank() == 1) ExpectOk(comm.Recv(received, 0).Wait());
      if (comm.rank() == 1) ExpectEqual(received, sent, comm, "Recv");
      reduced = comm.AllReduce(sum, ReduceOp::kSum);
    }
    ExpectOk(reduced.Wait());
    ExpectEqual(sum, Full({8}, comm.size(), at::kFloat), comm, "AllReduce");
  });
}

TEST_P(CommunicatorConformance, MatchesTagsAndKeepsTheirOrder) {
  Run([](Communicator& comm) {
    const int next = (comm.rank() + 1) % comm.size();
    const int previous = (comm.rank() + comm.size() - 1) % comm.size();
    at::Tensor out[4];
    std::vector<Work> works;
    for (int i : {0, 1, 2, 3}) {  // tags 0, 1, 0, 1
      works.push_back(comm.Send(Full({5}, 10 * comm.rank() + i, at::kInt), next, i % 2));
    }
    for (int i : {1, 3, 0, 2}) {  // the other way round, but in order for each tag
      out[i] = Empty({5}, at::kInt);
      works.push_back(comm.Recv(out[i], previous, i % 2));
    }
    for (const Work& work : works) ExpectOk(work.Wait());
    for (int i : {0, 1, 2, 3}) {
      ExpectEqual(out[i], Full({5}, 10 * previous + i, at::kInt), comm, "Recv");
    }
  });
}

TEST_P(CommunicatorConformance, CollectivesGoAroundPendingRecvs) {
  Run([](Communicator& comm) {
    const int next = (comm.rank() + 1) % comm.size();
    const int previous = (comm.rank() + comm.size() - 1) % comm.size();
    at::Tensor out = Empty({3});
    Work received = comm.Recv(out, previous);
    at::Tensor x = Ones({3});
    ExpectOk(comm.AllReduce(x, ReduceOp::kSum).Wait());
    ExpectOk(comm.Send(x, next).Wait());
    ExpectOk(received.Wait());
    ExpectEqual(out, Full({3}, comm.size(), at::kFloat), comm, "Recv");
  });
}

TEST_P(CommunicatorConformance, SplitsIntoOverlappingRowsAndColumns) {
  Run([](Communicator& comm) {
    const int columns = 2;
    auto row = comm.Split(comm.rank() / columns, comm.rank());
    auto column = comm.Split(comm.rank() % columns, comm.rank());
    ASSERT_TRUE(row.ok()) << row.status();
    ASSERT_TRUE(column.ok()) << column.status();
    int64_t row_sum = 0, column_sum = 0;
    for (int rank = 0; rank < comm.size(); ++rank) {
      if (rank / columns == comm.rank() / columns) row_sum += 1 << rank;
      if (rank % columns == comm.rank() % columns) column_sum += 1 << rank;
    }
    at::Tensor x = Full({257}, 1 << comm.rank(), at::kLong);
    at::Tensor y = x.clone(), z = x.clone();
    Work on_row = (*row)->AllReduce(x, ReduceOp::kSum);
    Work on_column = (*column)->AllReduce(y, ReduceOp::kSum);
    Work on_all = comm.AllReduce(z, ReduceOp::kSum);
    ExpectOk(on_all.Wait());
    ExpectOk(on_column.Wait());
    ExpectOk(on_row.Wait());
    ExpectEqual(x, Full({257}, row_sum, at::kLong), **row, "row");
    ExpectEqual(y, Full({257}, column_sum, at::kLong), **column, "column");
    ExpectEqual(z, Full({257}, (1 << comm.size()) - 1, at::kLong), comm, "all");
  });
}

TEST_P(CommunicatorConformance, SplitOrdersByKeyAndLeavesOut) {
  Run([](Communicator& comm) {
    auto reversed = comm.Split(0, -comm.rank());
    ASSERT_TRUE(reversed.ok()) << reversed.status();
    EXPECT_EQ((*reversed)->rank(), comm.size() - 1 - comm.rank());
    EXPECT_EQ((*reversed)->name(), "world/1");
    const bool in = comm.rank() == 0;
    auto first = comm.Split(in ? std::optional<int>(5) : std::nullopt, 0);
    ASSERT_TRUE(first.ok()) << first.status();
    EXPECT_EQ(*first != nullptr, in);
    if (in) {
      EXPECT_EQ((*first)->size(), 1);
      at::Tensor x = Ones({3});
      ExpectOk((*first)->AllReduce(x, ReduceOp::kAverage).Wait());
      ExpectEqual(x, Ones({3}), **first, "alone");
    }
    auto nested = (*reversed)->Split(0, 0);
    ASSERT_TRUE(nested.ok()) << nested.status();
    EXPECT_EQ((*nested)->name(), "world/1/1");
    reversed->reset();  // what was split from it lives on
    at::Tensor x = Ones({3});
    ExpectOk((*nested)->AllReduce(x, ReduceOp::kSum).Wait());
    ExpectEqual(x, Full({3}, comm.size(), at::kFloat), comm, "nested");
  });
}

TEST_P(CommunicatorConformance, ThenStartsAfterTheWork) {
  Run([](Communicator& comm) {
    auto other = comm.Split(0, comm.rank());
    ASSERT_TRUE(other.ok()) << other.status();
    for (int round = 0; round < 20; ++round) {
      const int n = comm.size();
      at::Tensor in = Full({n * 100}, round + 1, at::kLong);
      at::Tensor mine = Zeros({100}, at::kLong);
      Work work =
          comm.ReduceScatterInto(mine, in, ReduceOp::kSum).Then(**other, [&](Communicator& c) {
            return c.AllReduce(mine, ReduceOp::kSum);
          });
      ExpectOk(work.Wait());
      ExpectEqual(mine, Full({100}, (round + 1) * n * n, at::kLong), comm, "Then");
    }
  });
}

TEST_P(CommunicatorConformance, WhatFollowsGoesOnWithoutItsCommunicator) {
  Run([](Communicator& comm) {
    auto other = comm.Split(0, comm.rank());
    ASSERT_TRUE(other.ok()) << other.status();
    at::Tensor x = Ones({5000}), y = Ones({3});
    const Work work = comm.AllReduce(x, ReduceOp::kSum).Then(**other, [&](Communicator& c) {
      return c.AllReduce(y, ReduceOp::kSum);
    });
    other->reset();
    ExpectOk(work.Wait());
    ExpectEqual(y, Full({3}, comm.size(), at::kFloat), comm, "Then");
  });
}

TEST_P(CommunicatorConformance, RanksMayLeaveOnceTheyHaveIssuedAll) {
  Run([](Communicator& comm) {
    auto part = comm.Split(0, comm.rank());
    ASSERT_TRUE(part.ok()) << part.status();
    const int n = comm.size();
    at::Tensor received = Empty({5000}, at::kLong);
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    // One after another: the first has left long before the last comes.
    absl::SleepFor(comm.rank() * absl::Milliseconds(700));
    for (int64_t count : {3, 70001, 5}) {
      tensors.push_back(Full({count}, comm.rank() + 1, at::kLong));
      works.push_back((*part)->AllReduce(tensors.back(), ReduceOp::kSum));
    }
    works.push_back((*part)->Send(Full({5000}, comm.rank()), (comm.rank() + 1) % n));
    works.push_back((*part)->Recv(received, (comm.rank() + n - 1) % n));
    part->reset();
    for (const Work& work : works) ExpectOk(work.Wait());
    for (const at::Tensor& tensor : tensors) {
      ExpectEqual(tensor, Full({tensor.numel()}, n * (n + 1) / 2, at::kLong), comm, "AllReduce");
    }
  });
}

TEST_P(CommunicatorConformance, EmptyGivesTensorsToWorkOn) {
  Run([](Communicator& comm) {
    at::Tensor x = comm.Empty({3, 5}, at::kBFloat16);
    EXPECT_EQ(x.sizes(), at::IntArrayRef({3, 5}));
    EXPECT_EQ(x.scalar_type(), at::kBFloat16);
    EXPECT_EQ(x.device(), comm.device());
    x.fill_(1);
    ExpectOk(comm.AllReduce(x, ReduceOp::kSum).Wait());
    ExpectEqual(x, Full({3, 5}, comm.size(), at::kBFloat16), comm, "Empty");
  });
}

TEST_P(CommunicatorConformance, HasAStore) {
  Run([](Communicator& comm) {
    const std::string key = "conformance/" + std::to_string(comm.rank());
    ExpectOk(comm.store().Set(key, "here"));
    for (int rank = 0; rank < comm.size(); ++rank) {
      auto value = comm.store().Get("conformance/" + std::to_string(rank), absl::Seconds(60));
      ASSERT_TRUE(value.ok()) << value.status();
      EXPECT_EQ(*value, "here");
    }
    ExpectOk(comm.Barrier().Wait());
  });
}

TEST_P(CommunicatorConformance, RefusesWhatItCannotDo) {
  Run([](Communicator& comm) {
    const int n = comm.size();
    const auto sum = ReduceOp::kSum;
    ExpectRefused(comm.AllReduce(at::Tensor(), sum), "undefined");
    ExpectRefused(comm.AllReduce(Ones({4, 4}).t(), sum), "not contiguous");
    ExpectRefused(comm.AllReduce(Ones({4}, at::kBool), sum), "Bool is not supported");
    ExpectRefused(comm.AllReduce(Ones({4}, at::kInt), ReduceOp::kAverage), "floating-point");
    ExpectRefused(comm.AllGatherInto(Ones({4 * n + 1}), Ones({4})), "the output has");
    ExpectRefused(comm.AllGatherInto(Ones({4 * n}, at::kDouble), Ones({4})),
                  "the input is Float, the output Double");
    ExpectRefused(comm.ReduceScatterInto(Ones({4}), Ones({4 * n + 1}), sum), "the input has");
    ExpectRefused(comm.AllToAll(Ones({n}), Ones({n + 1})), "must be equal");
    ExpectRefused(comm.Broadcast(Ones({4}), n), "is none of the");
    ExpectRefused(comm.Send(Ones({4}), -1), "is none of the");
    ExpectRefused(comm.Send(Ones({4}), 0, -1), "the tag must be from 0 to 32767");
    ExpectRefused(comm.Recv(Ones({4}), 0, 32768), "the tag must be from 0 to 32767");
    ExpectRefused(comm.GatherInto(Ones({4}), Ones({4}), -1), "is none of the");
    at::Tensor both = Ones({4 * n + 1});
    ExpectRefused(
        comm.AllGatherInto(both.narrow(0, 0, 4 * n), both.narrow(0, 4 * comm.rank() + 1, 4)),
        "overlap");
    // Nothing was started or spoilt.
    at::Tensor x = Ones({4});
    ExpectOk(comm.AllReduce(x, sum).Wait());
    ExpectEqual(x, Full({4}, n, at::kFloat), comm, "AllReduce");
  });
}

TEST_P(CommunicatorConformance, NextCallReturnsARefusalNobodySaw) {
  Run([](Communicator& comm) {
    static_cast<void>(comm.AllReduce(Ones({4, 4}).t(), ReduceOp::kSum));
    ExpectRefused(comm.Barrier(), "not contiguous");
    ExpectOk(comm.Barrier().Wait());
  });
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CommunicatorConformance);

}  // namespace lockstep::comm::testing

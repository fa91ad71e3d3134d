// What the ranks do while a fault strikes one of them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shardcomm/communicator.h"
#include "shardcomm/stream.h"

namespace faults {

// A rank and what it holds. Everything that an operation needs of the test itself is made in
// `prepare`, so that only the core's calls count as points.
struct Rank {
  std::string address;  // of the session
  int rank = 0;
  int size = 0;
  int victim = 0;
  double deadline_s = 0;

  std::optional<shardcomm::ShmMember> member;
  std::shared_ptr<shardcomm::Communicator> comm;
  std::shared_ptr<shardcomm::Memory> gather;  // communication memory
  std::shared_ptr<shardcomm::Memory> reduce;
  std::vector<float> send;
  std::vector<float> recv;

  void join() { member.emplace(address, rank, size); }
  void attach() { comm = member->attach({deadline_s}); }
  void let_go();
};

struct Operation {
  const char* name;
  std::function<void(Rank&)> prepare;
  std::function<void(Rank&)> run;
  // The first thing that is not as arithmetic says, after `run` went well on this rank; else "".
  std::function<std::string(const Rank&)> wrong;
  bool ends = false;  // the communicator is not usable after it
};

const std::vector<Operation>& operations();

// What every rank does after an operation that went well on it: the ranks still agree on what comes
// next. Returns what is wrong; throws CommError.
std::string go_on(Rank& rank);

}  // namespace faults

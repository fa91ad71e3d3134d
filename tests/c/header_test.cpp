// shardcomm.hpp: every class of it, on ranks that are threads.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "shardcomm.hpp"

namespace {

// Else a number that is no enumerator would be undefined before the library could refuse it.
template <class... Enums>
constexpr bool are_ints = (std::is_same_v<std::underlying_type_t<Enums>, int> && ...);
static_assert(are_ints<shc_status, shc_dtype, shc_transport, shc_use, shc_op, shc_phase, shc_verb>);

void require(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", claim);
  std::exit(1);
}

template <class Body>
void on_threads(int size, Body body) {
  const shc::UniqueId id = shc::unique_id(SHC_LOCAL, size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([=] {
      shc_comm_options options = shc::comm_options();
      options.deadline_s = 60;
      body(shc::Comm(size, id, rank, options));
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

void collectives_know_the_types_of_their_elements(const shc::Comm& comm) {
  const int rank = comm.rank();
  const std::vector<double> send = {rank + 0.5, rank + 0.25};
  const shc::Buffer<double> full(comm, 2 * comm.size(), SHC_GATHER);
  comm.all_gather(send.data(), full.data(), 2);
  for (int r = 0; r < comm.size(); ++r) require(full[2 * r] == r + 0.5, "gathered");
  require(full.end() - full.begin() == full.size(), "a range");

  std::vector<std::int32_t> ones(static_cast<std::size_t>(comm.size()), 1);
  std::int32_t sum = 0;
  comm.reduce_scatter(ones.data(), &sum, 1);
  require(sum == comm.size(), "reduced");
  std::int64_t most = rank;
  comm.all_reduce(&most, 1, SHC_MAX);
  require(most == comm.size() - 1, "the greatest");
  float word = static_cast<float>(rank);
  comm.broadcast(&word, 1, 1);
  require(word == 1, "of rank 1");
  for (const std::int64_t count : {std::int64_t{-1}, std::int64_t{1} << 61}) {
    try {
      const shc::Buffer<double> wrong(comm, count, SHC_GATHER);
      require(false, "so many elements have no number of bytes");
    } catch (const std::invalid_argument&) {
    }
    try {
      comm.broadcast(&most, count);
      require(false, "nor have they in a broadcast");
    } catch (const shc::Error& error) {
      require(error.status() == SHC_INVALID_ARGUMENT, "and no rank is lost");
    }
  }
  comm.name_tag((std::int64_t{1} << 32) + 7, "the end");
  comm.barrier();
  require(comm.receipt("all_gather")->sequence > 0, "a receipt");
}

// Rank r sends r + 1 elements to each, of which a stream takes some.
void exchanges_know_the_types_of_their_elements(const shc::Comm& comm) {
  const auto size = static_cast<std::size_t>(comm.size());
  const std::vector<std::int64_t> sent(size, comm.rank() + 1);
  std::vector<std::int64_t> received;
  std::int64_t total = 0;
  for (int r = 0; r < comm.size(); ++r) received.push_back(r + 1);
  for (const std::int64_t count : received) total += count;
  const std::vector<std::int8_t> send(size * size, static_cast<std::int8_t>(comm.rank()));
  std::vector<std::int8_t> recv(static_cast<std::size_t>(total));
  const shc::Stream stream;
  comm.all_to_all(send.data(), sent, recv.data(), received);
  require(recv[0] == 0 && recv[1] == 1 && recv[2] == 1, "one of rank 0 and two of rank 1");
  const shc::Collective again = comm.bind_all_to_all(send.data(), sent, recv.data(), received);
  recv.assign(recv.size(), 9);
  again(&stream);
  require(stream.record().wait(60) && recv[0] == 0 && recv.back() == comm.size() - 1, "again");
  try {
    comm.all_to_all(send.data(), {1}, recv.data(), received);
    require(false, "a count for each rank");
  } catch (const std::invalid_argument& error) {
    require(std::string(error.what()).find("send_counts has 1 numbers") != std::string::npos,
            "which it says");
  }

  const double own = comm.rank() + 0.5;
  std::vector<double> all(size);
  double part = 0;
  comm.gather(&own, all.data(), 1, 1);
  if (comm.rank() == 1) require(all[2] == 2.5, "gathered");
  comm.scatter(all.data(), &part, 1, 1, &stream);
  require(stream.record().wait(60) && part == own, "scattered");
  std::int32_t product = 0;
  const std::int32_t factor = comm.rank() + 2;
  comm.reduce(&factor, &product, 1, SHC_PROD, 2);
  if (comm.rank() == 2) require(product == 24, "multiplied");
  part = 0;
  comm.bind_gather(&own, all.data(), 1, 2)();
  comm.bind_scatter(all.data(), &part, 1, 2)();
  require(part == own, "there and back");
  comm.bind_reduce(&factor, &product, 1, SHC_BOR, 0)();
  if (comm.rank() == 0) require(product == 7, "bits of 2, 3 and 4");
  require(comm.receipt("scatter")->sequence > 0, "a receipt");
}

void bound_collectives_run_on_streams_too(const shc::Comm& comm) {
  std::vector<float> values = {1, 2};
  std::vector<float> part(1);
  std::vector<float> all(static_cast<std::size_t>(comm.size()));
  const shc::Collective reduce = comm.bind_all_reduce(values.data(), 2);
  const shc::Collective gather = comm.bind_all_gather(part.data(), all.data(), 1);
  const shc::Collective scatter = comm.bind_reduce_scatter(all.data(), part.data(), 1, SHC_AVG);
  const shc::Collective share = comm.bind_broadcast(values.data(), 2);
  const shc::Collective meet = comm.bind_barrier();
  const shc::Stream stream;
  reduce();
  reduce(&stream);
  const shc::Event end = stream.record();
  require(end.wait(60) && end.query(), "it has ended");
  const auto size = static_cast<float>(comm.size());
  require(values[1] == 2 * size * size, "summed twice");
  part[0] = 3;
  gather();
  meet();
  scatter();
  require(part[0] == 3, "the mean of what all have");
  share();
}

struct Arrival {
  int from;
  double time_s;
};

// Each rank sends to the next one, and rank 0 then hears of all.
void messages_carry_objects(const shc::Comm& comm) {
  const int rank = comm.rank();
  const int next = (rank + 1) % comm.size();
  const int before = (rank + comm.size() - 1) % comm.size();
  const Arrival own{rank, 0.5};
  Arrival heard[2] = {};
  const shc::Request arrival = comm.irecv(heard, 1, SHC_ANY_SOURCE, 1);
  require(!arrival.wait(0) && !arrival.source(), "nothing has been sent");
  comm.barrier();
  const shc::Request departure = comm.isend(&own, 1, next, 1);
  require(departure.source() == next, "the destination");
  while (!arrival.test()) departure.test();
  require(departure.wait() && arrival.source() == before, "who sent it");
  require(heard[0].from == before && heard[0].time_s == 0.5, "what was sent");

  if (rank != 0) return comm.send(&own, 1, 0, 2);
  const shc::Request second = comm.irecv(&heard[1], 1, 1, 2);
  require(comm.recv(heard, 1, 2, 2) == 2 && heard[0].from == 2, "of rank 2");
  require(second.test() || comm.wait_any() == second.get(), "the request that has ended");
  require(heard[1].from == 1, "of rank 1");
  comm.wake_any();
  require(comm.wait_any() == nullptr, "it was woken");
  const shc::Request never = comm.irecv(heard, 1, 1, 3);
  try {
    shc::check(shc_request_test(never.get()));
    require(false, "it has not ended, and shc::check returns only where all is well");
  } catch (const std::invalid_argument& error) {
    require(std::string(error.what()).find("is no error") != std::string::npos, "nor is there one");
  }
}

std::atomic<int> ready{0};

void errors_are_exceptions_with_their_fields(const shc::Comm& comm) {
  float value = 0;
  try {
    comm.all_reduce(&value, -1);
    require(false, "a negative count is refused");
  } catch (const shc::Error& error) {
    require(error.status() == SHC_INVALID_ARGUMENT, "a mistake of the caller's");
    require(std::string(error.what()).find("count is -1") != std::string::npos, "which is named");
  }
  require(!comm.receipt("broadcast"), "there was no broadcast");
  comm.check_alive();
  ++ready;
  while (ready < comm.size()) std::this_thread::yield();  // else a rank may be in its set-up still
  if (comm.rank() == 0) comm.abort("enough");
  try {
    comm.barrier();
    require(false, "a group that was aborted only fails");
  } catch (const shc::Error& error) {
    require(error.status() == SHC_COMM_ERROR && error.kind() == "aborted", "it was aborted");
    require(error.rank() == 0 && error.reporter() >= 0, "by rank 0, which somebody noticed");
    require(error.operation().empty() == (error.sequence() == 0), "in this call, or before it");
  }
  comm.close();
}

void layouts_and_copies(const shc::Comm& comm) {
  const shc::Layout layout({{4, 6, 1}, {5, 4, 1}}, 2);
  const shc::Layout again = shc::Layout::deserialize(layout.serialize());
  require(again.shard_elements() == 24 && again.offset(1) == layout.offset(1), "the same layout");
  require(again.param_count() == 2 && again.world_size() == 2, "of two parameters and two ranks");
  require(layout.piece(0, 0).count + layout.piece(0, 1).count == 24, "all of the parameter");

  const shc::CopyPlan plan({{0, 0, 0, 2, 0, 2, 1, 2}}, SHC_F32, SHC_F32);
  const float from[2] = {1, 2};
  float to[2] = {0, 0};
  const shc::Copy copy(plan, {from}, {to});
  copy();
  shc_copy_options options = shc::copy_options();
  options.scale = 3;
  const shc::Stream stream;
  copy(&stream, options);
  const shc::Stream second;
  second.wait(stream.record());
  require(second.record().wait(), "after the copy");
  require(to[0] == 3 && to[1] == 6, "copied");
  try {
    const shc::Copy wrong(plan, {from, from}, {to});
    require(false, "one pointer for each operand");
  } catch (const std::invalid_argument&) {
  }
  comm.barrier();
}

void schedules(const shc::Comm&) {
  const shc::Schedule schedule = shc::Schedule::parse(
      R"({"shardcomm_schedule": 1, "num_slots": 2, "slot_of": [1], "triggers": [)"
      R"({"phase": "pre_forward", "unit": 0, "actions": [["gather", 0, 1]]}]})");
  require(schedule.unit_count() == 1 && schedule.slot_count() == 2, "a unit and two slots");
  require(schedule.slot_of(0) == 1, "the unit's slot");
  const std::vector<shc_action> actions = schedule.actions(SHC_PRE_FORWARD, 0);
  require(actions.size() == 1 && actions[0].verb == SHC_VERB_GATHER, "what is done there");
  require(schedule.actions(SHC_POST_FORWARD, 0).empty(), "and nothing there");
}

}  // namespace

int main() {
  on_threads(3, collectives_know_the_types_of_their_elements);
  on_threads(3, exchanges_know_the_types_of_their_elements);
  on_threads(3, messages_carry_objects);
  on_threads(2, bound_collectives_run_on_streams_too);
  on_threads(2, errors_are_exceptions_with_their_fields);
  on_threads(1, layouts_and_copies);
  on_threads(1, schedules);
}

// What kernels do on their streams: wait for those of the other ranks, or for an abort, and
// exchange data. Also which kernel a collective gets.
#include <cstdio>
#include <cstring>

#include "fake_nccl/comm.h"
#include "fake_nccl/reduce.h"

namespace fake_nccl {
namespace {

bool same(const Work& a, const Work& b) {
  return a.kind == b.kind && a.count == b.count && a.dtype == b.dtype && a.op == b.op &&
         a.root == b.root;
}

bool all_came(const World::Meeting& meeting, const Work& mine, int size) {
  if (static_cast<int>(meeting.work.size()) < size) return false;
  for (const auto& [rank, theirs] : meeting.work) {
    if (!same(theirs, mine)) return false;
  }
  return true;
}

// Whether a broadcast's data comes to a rank over its ring. A rank whose memory is registered takes
// its data for written there already by the rank before (device/prims_simple.h, genericOp: "skip
// one copy"), which a rank does whose memory is registered too; else it writes into a buffer of
// NCCL's. (The other way round it would wait for ever for an address: setDataPtrs.)
bool arrives(const std::map<int, Work>& work, int rank, int root) {
  const int size = static_cast<int>(work.size());
  for (int from = root; from != rank;) {
    const int to = (from + 1) % size;
    if (work.at(to).registered && !work.at(from).registered) return false;
    from = to;
  }
  return true;
}

// A ring's partial sum for rank `last` starts behind it and ends at it. A symmetric kernel starts
// with its own rank's elements.
std::vector<const char*> in_order(const std::map<int, Work>& work, int last, bool symmetric,
                                  std::size_t offset) {
  const int size = static_cast<int>(work.size());
  std::vector<const char*> sources;
  for (int i = 0; i < size; ++i) {
    sources.push_back(work.at((last + i + (symmetric ? 0 : 1)) % size).send + offset);
  }
  return sources;
}

std::vector<char> reduced_part(const std::map<int, Work>& work, int owner, std::size_t offset,
                               std::size_t count, const Work& mine) {
  const bool symmetric = mine.path == Path::symmetric;
  std::vector<char> result(count * item_bytes(mine.dtype));
  reduce(mine.dtype, in_order(work, owner, symmetric, offset), result.data(), count, mine.op,
         symmetric);
  return result;
}

// Where each rank's share of the elements ends.
std::size_t share(std::size_t count, int rank, int size) {
  return count * static_cast<std::size_t>(rank) / static_cast<std::size_t>(size);
}

using Results = std::vector<std::pair<char*, std::vector<char>>>;

Results compute(const std::map<int, Work>& work, int rank, const Work& mine) {
  const int size = static_cast<int>(work.size());
  const std::size_t item = item_bytes(mine.dtype);
  const std::size_t bytes = mine.count * item;
  Results results;
  if (mine.kind == Kind::gather) {
    for (const auto& [from, theirs] : work) {
      results.push_back(
          {mine.recv + static_cast<std::size_t>(from) * bytes, {theirs.send, theirs.send + bytes}});
    }
  } else if (mine.kind == Kind::scatter) {
    results.push_back({mine.recv, reduced_part(work, rank, static_cast<std::size_t>(rank) * bytes,
                                               mine.count, mine)});
  } else if (mine.kind == Kind::reduce) {
    for (int owner = 0; owner < size; ++owner) {
      const std::size_t begin = share(mine.count, owner, size);
      const std::size_t count = share(mine.count, owner + 1, size) - begin;
      results.push_back(
          {mine.recv + begin * item, reduced_part(work, owner, begin * item, count, mine)});
    }
  } else if (mine.kind == Kind::reduce_to) {
    if (rank != mine.root) return results;
    results.push_back({mine.recv, reduced_part(work, rank, 0, mine.count, mine)});
  } else if (arrives(work, rank, mine.root)) {
    const char* from = work.at(mine.root).send;
    results.push_back({mine.recv, {from, from + bytes}});
  }
  return results;
}

// What this rank sends: on a ring to the next rank; where ranks reach each other's memory, to each.
void count_bytes(const Comm* comm, const Work& work) {
  const auto size = static_cast<unsigned long long>(comm->size());
  const unsigned long long bytes = work.count * item_bytes(work.dtype);
  const bool direct = work.path != Path::ring && work.kind != Kind::reduce;
  if (direct) {
    for (int to = 0; to < comm->size(); ++to) {
      if (to != comm->rank) sent(comm->rank, to, bytes);
    }
    return;
  }
  const int next = (comm->rank + 1) % comm->size();
  if (work.kind == Kind::broadcast) {
    if (next != work.root) sent(comm->rank, next, bytes);
  } else if (work.kind == Kind::reduce_to) {
    if (comm->rank != work.root) sent(comm->rank, next, bytes);
  } else if (work.kind == Kind::reduce) {
    sent(comm->rank, next, 2 * (size - 1) * bytes / size);
  } else {
    sent(comm->rank, next, (size - 1) * bytes);
  }
}

bool ends_by_abort(const Work& work) {
  return work.path == Path::ring || (work.path == Path::symmetric && kAbortsSymmetric);
}

void collective_kernel(Comm* comm, const Work& mine) {
  World& world = *comm->world;
  const bool hangs = faults().kernels_hang;
  const bool abortable = ends_by_abort(mine);
  const Waiting waiting(controls().kernels_waiting);
  const auto aborted = [=] { return abortable && comm->abort_flag; };
  std::unique_lock<std::mutex> lock(world.mutex);
  const std::uint64_t number = comm->executed++;
  World::Meeting& meeting = world.meetings[number];
  meeting.work[comm->rank] = mine;
  world.changed.notify_all();
  world.changed.wait(lock,
                     [&] { return aborted() || (!hangs && all_came(meeting, mine, world.size)); });
  if (aborted()) {
    meeting.work.erase(comm->rank);  // its memory may go
    return;
  }
  Results results = compute(meeting.work, comm->rank, mine);
  // Nobody writes before all have read.
  ++meeting.leaving;
  world.changed.notify_all();
  world.changed.wait(lock, [&] { return aborted() || meeting.leaving == world.size; });
  if (aborted()) {
    meeting.work.erase(comm->rank);
    return;
  }
  if (++meeting.left == world.size) world.meetings.erase(number);
  lock.unlock();
  for (auto& [to, data] : results) {
    if (!data.empty()) std::memcpy(to, data.data(), data.size());
  }
  count_bytes(comm, mine);
}

// Each rank decides by itself whether its side is registered (enqueue.cc, addP2pToPlan: "We require
// users registering buffers on both sides"). A sender whose side is waits for an address that the
// other side does not post, and a receiver whose side is for data that comes into a buffer of
// NCCL's (device/prims_simple.h, setDataPtrs). Played is that neither ends.
bool is_one_sided(Mail& mail, const Message& receive, int rank) {
  if (receive.peer == rank || mail.registered == receive.registered) return false;
  if (!mail.told) {
    count(&FakeNcclCounts::one_sided_messages);
    std::fprintf(stderr, "%zu bytes from rank %d to rank %d: the %s side alone is registered\n",
                 mail.bytes, receive.peer, rank, mail.registered ? "sender's" : "receiver's");
  }
  mail.told = true;
  return true;
}

// Sends wait until they are received, and receives for their sends, whatever the order.
void message_kernel(Comm* comm, const Work& mine) {
  World& world = *comm->world;
  const bool hangs = faults().kernels_hang;
  const Waiting waiting(controls().kernels_waiting);
  std::vector<std::shared_ptr<Mail>> outgoing;
  std::vector<Message> incoming;
  std::unique_lock<std::mutex> lock(world.mutex);
  for (const Message& each : mine.messages) {
    if (each.sent) {
      outgoing.push_back(std::make_shared<Mail>(Mail{each.data, each.bytes, each.registered}));
      world.mail[{comm->rank, each.peer}].push_back(outgoing.back());
    } else {
      incoming.push_back(each);
    }
  }
  world.changed.notify_all();
  // Takes what has come, in the order of the receives from each peer.
  const auto take = [&] {
    std::set<int> waiting;
    for (auto each = incoming.begin(); each != incoming.end();) {
      auto& box = world.mail[{each->peer, comm->rank}];
      if (waiting.count(each->peer) > 0 || box.empty() || box.front()->bytes != each->bytes ||
          is_one_sided(*box.front(), *each, comm->rank)) {
        waiting.insert(each->peer);
        ++each;
        continue;
      }
      if (each->bytes > 0) std::memcpy(each->data, box.front()->data, each->bytes);
      if (each->registered && each->peer != comm->rank) count(&FakeNcclCounts::messages_direct);
      box.front()->taken = true;
      box.pop_front();
      each = incoming.erase(each);
      world.changed.notify_all();
    }
    return incoming.empty();
  };
  world.changed.wait(lock, [&] {
    if (comm->abort_flag) return true;
    if (hangs || !take()) return false;
    for (const auto& each : outgoing) {
      if (!each->taken) return false;
    }
    return true;
  });
  if (comm->abort_flag) {  // their memory may go
    for (auto& [_, box] : world.mail) {
      for (const auto& each : outgoing) {
        for (auto at = box.begin(); at != box.end();) at = *at == each ? box.erase(at) : at + 1;
      }
    }
    return;
  }
  lock.unlock();
  for (const Message& each : mine.messages) {
    if (each.sent && each.peer != comm->rank) sent(comm->rank, each.peer, each.bytes);
  }
}

void run_kernel(Comm* comm, const Work& work) {
  if (comm->abort_flag && ends_by_abort(work)) return;
  if (work.kind == Kind::messages) {
    message_kernel(comm, work);
  } else if (comm->size() > 1) {
    collective_kernel(comm, work);
  } else if (work.send != work.recv) {  // ncclLaunchOneRank
    std::memcpy(work.recv, work.send, work.count * item_bytes(work.dtype));
  }
}

void count_path(const Work& work) {
  count(&FakeNcclCounts::collectives);
  const bool ring = work.path == Path::ring;
  if (work.kind == Kind::gather) {
    count(ring                           ? &FakeNcclCounts::gathers_ring
          : work.path == Path::symmetric ? &FakeNcclCounts::gathers_symmetric
                                         : &FakeNcclCounts::gathers_copy_engine);
  } else if (work.kind == Kind::scatter) {
    count(ring ? &FakeNcclCounts::scatters_ring : &FakeNcclCounts::scatters_symmetric);
  }
  const bool reduces =
      work.kind == Kind::scatter || work.kind == Kind::reduce || work.kind == Kind::reduce_to;
  if (reduces && ring && work.op == op_avg && is_float(work.dtype)) {
    count(&FakeNcclCounts::averages_premultiplied);
  }
}

}  // namespace

// Symmetric kernels: one node, both buffers in symmetric windows (enqueue.cc of 2.27 and
// scheduler/symmetric_sched.cc of 2.28), a gather, or a sum of floats that are not f64
// (ncclSymkImplemented). Copy engines, for gathers alone: enqueue.cc of 2.28, taskAppend, and
// ncclCeAvailable of 2.30. 2.27 asks further that the group has nothing else in it.
Path path_of(Comm* comm, const Work& work) {
  if (!comm->symmetric || comm->nodes > 1) return Path::ring;
  const std::size_t part = work.count * item_bytes(work.dtype);
  const std::size_t whole = part * static_cast<std::size_t>(comm->size());
  const bool is_scatter = work.kind == Kind::scatter;
  const bool source = in_window(comm, work.send, is_scatter ? whole : part);
  const bool target = in_window(comm, work.recv, work.kind == Kind::gather ? whole : part);
  if (work.kind == Kind::gather) {
    if (!target || !(source || kOneWindowIsEnough)) return Path::ring;
    return (comm->cta_policy & 2) != 0 ? Path::copy_engine : Path::symmetric;
  }
  if (!is_scatter && work.kind != Kind::reduce) return Path::ring;
  const bool sums = work.op == op_sum || (kOneWindowIsEnough && work.op == op_avg);
  if (!sums || !is_float(work.dtype) || work.dtype == 8 || !source) return Path::ring;
  return target || (is_scatter && kOneWindowIsEnough) ? Path::symmetric : Path::ring;
}

// Kernels of one communicator run in the order of their launch, on whatever streams (enqueue.cc,
// ncclLaunchPrepare); in a graph, in the graph's order. What a graph holds keeps the communicator
// (persistentRefs).
void launch(Comm* comm, Work work, cudaStream_t stream) {
  const bool captured = fake_is_capturing(stream);
  for (Message& each : work.messages) {
    each.registered = is_registered(comm, each.data, each.bytes, captured);
  }
  if (work.kind == Kind::broadcast) {
    const std::size_t bytes = work.count * item_bytes(work.dtype);
    work.registered = is_registered(comm, work.recv, bytes, captured) &&
                      (captured || (kRecvIsEnough && comm->nodes == 1) ||
                       is_registered(comm, work.send, bytes, false));
  }
  if (work.kind != Kind::messages) {
    work.path = path_of(comm, work);
    count_path(work);
  }
  const auto finished = [comm](int Comm::* counter) {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    --(comm->*counter);
    comm->changed.notify_all();
  };
  const auto done = std::make_shared<fake::Fired>(false);
  std::shared_ptr<fake::Fired> previous;
  {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    ++(captured ? comm->graph_refs : comm->running);
    if (!captured) previous = std::exchange(comm->last_kernel, done);
  }
  if (captured) {
    const std::shared_ptr<Comm> reference(comm, [=](Comm*) { finished(&Comm::graph_refs); });
    fake_enqueue(stream, [reference, work] { run_kernel(reference.get(), work); });
    return;
  }
  fake_enqueue(stream, [=] {
    if (previous) previous->wait();
    run_kernel(comm, work);
    done->set();
    finished(&Comm::running);
  });
}

}  // namespace fake_nccl

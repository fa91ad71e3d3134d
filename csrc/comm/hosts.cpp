#include "comm/hosts.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "comm/buffer.h"
#include "comm/waited.h"
#include "copy/copy_bytes.h"
#include "shardcomm/error.h"
#include "shardcomm/tile.h"
#include "stream/futex.h"
#include "stream/wait_check.h"

namespace shardcomm {
namespace {

constexpr std::size_t kMostSlotBytes = 8 * 1024 * 1024;

// FNV-1a: http://www.isthe.com/chongo/tech/comp/fnv/
std::uint64_t digest(const Parts& parts, int size) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (int r = 0; r < size; ++r) {
    for (int shift = 0; shift < 64; shift += 8) {
      const auto byte = (static_cast<std::uint64_t>(parts.count(r)) >> shift) & 0xff;
      hash = (hash ^ byte) * 0x100000001b3;
    }
  }
  return hash;
}

}  // namespace

std::shared_ptr<Communicator> make_hosts(std::shared_ptr<Communicator> on_host,
                                         std::unique_ptr<Across> across, int host, int hosts) {
  auto board = std::dynamic_pointer_cast<BoardCommunicator>(on_host);
  if (board == nullptr || !board->on_cpu()) {
    throw std::invalid_argument("on_host has transport '" + on_host->transport() +
                                "'; it must be a communicator of shm, or of local on a CPU");
  }
  if (board->exact_sums()) {
    throw std::invalid_argument(
        "on_host has exact sums, and hosts exchange rounded ones; make it without");
  }
  if (hosts < 2 || host < 0 || host >= hosts) {
    throw std::invalid_argument("host is " + std::to_string(host) + " of " + std::to_string(hosts) +
                                "; there must be at least 2, numbered from 0 on");
  }
  board->join_hosts(host, hosts);
  auto comm = std::make_shared<HostsCommunicator>(std::move(board), std::move(across), host, hosts);
  comm->attach();
  return comm;
}

HostsCommunicator::Lane::Lane(BoardCommunicator& on_host, int hosts, int of_channel, int blocks)
    : channel(of_channel),
      block_bytes(block_room(blocks)),
      slot_bytes(block_bytes * static_cast<std::size_t>(blocks)),
      stage(on_host.allocate(kSlots * slot_bytes, Use::gather)),
      hellos(static_cast<std::size_t>(hosts)),
      sources(static_cast<std::size_t>(std::max(hosts, on_host.size()))) {}

std::size_t HostsCommunicator::Lane::block_room(int blocks) {
  const std::size_t room = kMostSlotBytes / static_cast<std::size_t>(blocks) / 64 * 64;
  return std::clamp<std::size_t>(room, Hello::kBytes, kMostBlockBytes);
}

std::byte* HostsCommunicator::Lane::slot(std::int64_t chunk) const {
  return static_cast<std::byte*>(stage->data()) +
         static_cast<std::size_t>(chunk % kSlots) * slot_bytes;
}

HostsCommunicator::HostsCommunicator(std::shared_ptr<BoardCommunicator> on_host,
                                     std::unique_ptr<Across> across, int host, int hosts)
    : on_host_(std::move(on_host)),
      across_(std::move(across)),
      host_(host),
      hosts_(hosts),
      local_(on_host_->size()),
      gathers_(*on_host_, hosts, 0, size()),
      reduces_(*on_host_, hosts, 1, size() * local_) {}

HostsCommunicator::~HostsCommunicator() { close(); }

void HostsCommunicator::attach() {
  for (Lane* lane : {&gathers_, &reduces_}) {
    Call call;
    call.op = Op::attach;
    perform(*lane, call, {}, [&] { greet(*lane); });
  }
}

std::shared_ptr<Memory> HostsCommunicator::allocate(std::size_t bytes, Use use) {
  Lane& lane = use == Use::gather ? gathers_ : reduces_;
  std::shared_ptr<Memory> memory;
  telling_others([&] { memory = on_host_->allocate(bytes, use); });
  Call call;
  call.op = Op::allocate;
  call.root = static_cast<std::int32_t>(use);
  call.count = static_cast<std::int64_t>(bytes);
  perform(lane, call, {}, [&] { greet(lane); });
  return memory;
}

Mailbox& HostsCommunicator::mailbox() { refuse("messages between two ranks"); }

void HostsCommunicator::name_tag(std::int64_t tag, const std::string& name) {
  on_host_->name_tag(tag, name);
}

void HostsCommunicator::abort(const std::string& reason) noexcept {
  on_host_->abort(reason);
  leave_others();
}

void HostsCommunicator::close() noexcept {
  on_host_->close();
  leave_others();
}

// A forked child must not close its parent's connections.
void HostsCommunicator::leave_others() noexcept {
  if (!on_host_->forked()) across_->leave();
}

void HostsCommunicator::telling_others(const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    if (on_host_->has_failed()) leave_others();  // so that they hear of it
    throw;
  }
}

void HostsCommunicator::perform(Lane& lane, Call call, const Parts& parts,
                                const std::function<void()>& body) {
  call.uneven = !parts.equal();
  if (call.uneven) call.handle = digest(parts, size());
  telling_others([&] {
    on_host_->perform_call(lane.channel, call, [&] {
      for (int i = 0; i < local_; ++i) {  // the digests; the board has compared the rest
        check_same(lane, on_host_->call_of(lane.channel, i), first() + i);
      }
      try {
        body();
      } catch (const CommError& error) {
        // A rank of this host may have died, which is why other hosts have left. Else the others of
        // this host hear of it in the same words.
        on_host_->check_outside(lane.channel);
        const bool late = std::string_view(error.fault().kind) == "late";
        on_host_->end_for(late ? Trouble::late_hosts : Trouble::lost_hosts, error.what());
        throw;
      }
    });
  });
}

void HostsCommunicator::check_same(const Lane& lane, const Call& other, int rank) const {
  const Call& own = on_host_->call_of(lane.channel, index());
  if (!own.same_as(other)) {
    on_host_->refuse(lane.channel,
                     "ranks called different collectives: rank " + std::to_string(this->rank()) +
                         " called " + on_host_->describe(own) + ", and rank " +
                         std::to_string(rank) + " called " + on_host_->describe(other));
  }
  if (!own.agrees_with(other)) {
    on_host_->refuse(lane.channel, "ranks " + std::to_string(this->rank()) + " and " +
                                       std::to_string(rank) + " gave different counts to " +
                                       on_host_->describe(own));
  }
}

void HostsCommunicator::greet(Lane& lane, const void* payload, std::size_t bytes) {
  start_greeting(lane, payload, bytes);
  finish_greeting(lane);
}

bool HostsCommunicator::is_the_rank_of(const Hello& other, int host) const {
  return other.rank == rank_at(host, index()) && other.size == size();
}

void HostsCommunicator::start_greeting(Lane& lane, const void* payload, std::size_t bytes) {
  lane.hello.call = on_host_->call_of(lane.channel, index());
  lane.hello.rank = rank();
  lane.hello.size = size();
  if (bytes > 0) std::memcpy(lane.hello.payload, payload, bytes);
  lane.greeting = enqueue(lane, [this, &lane](Across& across, int channel) {
    lane.agreed = false;
    across.all_gather(channel, &lane.hello, lane.hellos.data(), sizeof(Hello));
    bool agreed = true;
    for (int host = 0; host < hosts_; ++host) {
      const Hello& other = lane.hellos[static_cast<std::size_t>(host)];
      agreed &= is_the_rank_of(other, host) && lane.hello.call.agrees_with(other.call);
    }
    lane.agreed = agreed;
  });
}

void HostsCommunicator::finish_greeting(Lane& lane) {
  if (lane.greeting == nullptr) return;
  wait_for(lane, *lane.greeting);
  lane.greeting = nullptr;
  for (int host = 0; host < hosts_; ++host) {
    const Hello& other = lane.hellos[static_cast<std::size_t>(host)];
    if (!is_the_rank_of(other, host)) {
      on_host_->refuse(lane.channel,
                       "what leads to host " + std::to_string(host) + " leads to rank " +
                           std::to_string(other.rank) + " of " + std::to_string(other.size) +
                           ", where rank " + std::to_string(rank_at(host, index())) + " of " +
                           std::to_string(size()) +
                           " belongs: the ranks with one index exchange with each other, in the "
                           "order of their hosts' numbers");
    }
    check_same(lane, other.call, rank_at(host, index()));
  }
}

void HostsCommunicator::start(Lane& lane, std::int64_t chunk, Crossing crossing) {
  lane.crossings[static_cast<std::size_t>(chunk % kSlots)] =
      enqueue(lane, [&lane, crossing = std::move(crossing)](Across& across, int channel) {
        if (lane.agreed) crossing(across, channel);
      });
}

void HostsCommunicator::finish(Lane& lane, std::int64_t chunk) {
  finish_greeting(lane);
  auto& crossing = lane.crossings[static_cast<std::size_t>(chunk % kSlots)];
  if (crossing != nullptr) wait_for(lane, *crossing);
  crossing = nullptr;
}

std::shared_ptr<Event> HostsCommunicator::enqueue(Lane& lane, Crossing crossing) {
  lane.worker->enqueue(
      [this, &lane, crossing = std::move(crossing), deadline_s = thread_deadline_s](NativeStream) {
        thread_deadline_s = deadline_s;  // what crosses, such as MPI, reads it
        cross(lane, crossing);
      });
  return lane.worker->record();
}

void HostsCommunicator::wait_for(const Lane& lane, const Event& event) {
  const Clock::time_point since = Clock::now();
  Waited waited(since);
  while (!event.wait_for(kWaitSlice)) {
    on_host_->tell_wait_across(lane.channel, since);
    check_wait();
    on_host_->check_outside(lane.channel);  // a rank that ends meanwhile ends this call, too
    if (waited.until_now().count() > on_host_->deadline_s()) throw_late(lane);
  }
  on_host_->tell_wait_across(lane.channel, std::nullopt);
}

void HostsCommunicator::throw_late(const Lane& lane) const {
  const Call& own = on_host_->call_of(lane.channel, index());
  CommFault fault = fault_in(own, "late");
  fault.reporter = rank();
  std::ostringstream text;
  text << "ranks of other hosts did not come within " << on_host_->deadline_s() << " s; rank "
       << rank() << " was in " << on_host_->describe(own);
  throw CommError(text.str(), fault);
}

void HostsCommunicator::start_and_finish(Lane& lane, Crossing crossing) {
  start(lane, 0, std::move(crossing));
  finish(lane, 0);
}

std::string HostsCommunicator::peers() const {
  std::ostringstream text;
  const char* comma = "";
  for (int host = 0; host < hosts_; ++host) {
    if (host == host_) continue;
    text << comma << "rank " << rank_at(host, index()) << " of host " << host;
    comma = ", ";
  }
  return text.str();
}

void HostsCommunicator::cross(const Lane& lane, const Crossing& crossing) {
  try {
    crossing(*across_, lane.channel);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    const Call& own = on_host_->call_of(lane.channel, index());
    CommFault fault = fault_in(own, "backend");
    fault.reporter = rank();
    throw CommError("rank " + std::to_string(rank()) + ", in " + on_host_->describe(own) +
                        ", lost the ranks of other hosts with which it exchanges, " + peers() +
                        ": " + error.what(),
                    fault);
  }
}

void HostsCommunicator::run_barrier(std::int64_t tag, NativeStream) {
  Call call;
  call.op = Op::barrier;
  call.tag = tag;
  perform(gathers_, call, {}, [&] {
    greet(gathers_);
    on_host_->meet(gathers_.channel);  // each rank has met its counterparts on the other hosts
  });
}

// No further meeting is needed: `perform` has met all ranks of this host.
void HostsCommunicator::run_sharing(const void* buffer, std::size_t bytes, std::int64_t tag) {
  Call call;
  call.op = Op::barrier;
  call.count = static_cast<std::int64_t>(bytes);
  call.tag = tag;
  call.recv = on_host_->place_of(buffer, bytes, "barrier: buffer");
  perform(gathers_, call, {}, [&] { on_host_->require_one_place(gathers_.channel); });
}

// A chunk has a block for each rank of a host, which takes it across.
void HostsCommunicator::run_broadcast(void* buffer, DType dtype, std::int64_t count, int root,
                                      NativeStream) {
  Lane& lane = gathers_;
  Call call;
  call.op = Op::broadcast;
  call.send_dtype = call.recv_dtype = dtype;
  call.root = root;
  call.count = count;
  const std::size_t bytes = bytes_of(count, dtype);
  call.send = on_host_->place_of(buffer, bytes, "broadcast: buffer");
  perform(lane, call, {}, [&] {
    // Into memory that all ranks of this host share, each writes the part that it took across,
    // before the last meeting. On the root's host, where it is the root's buffer, nobody writes.
    const bool in_window = on_host_->have_one_buffer(lane.channel);
    const int root_host = root / local_;
    greet(lane);
    const std::size_t step = lane.block_bytes * static_cast<std::size_t>(local_);
    for (std::size_t chunk = 0; chunk * step < bytes; ++chunk) {
      std::byte* slot = lane.slot(static_cast<std::int64_t>(chunk));
      std::byte* place = static_cast<std::byte*>(buffer) + chunk * step;
      const std::size_t length = std::min(step, bytes - chunk * step);
      if (rank() == root) copy_bytes(slot, place, length);
      on_host_->meet(lane.channel);
      const std::size_t begin =
          std::min(length, lane.block_bytes * static_cast<std::size_t>(index()));
      const std::size_t own = std::min(lane.block_bytes, length - begin);
      if (own > 0) {
        start_and_finish(lane, [part = slot + begin, own, root_host](Across& across, int channel) {
          across.broadcast(channel, part, own, root_host);
        });
        if (in_window && host_ != root_host) copy_bytes(place + begin, slot + begin, own);
      }
      on_host_->meet(lane.channel);
      if (!in_window && rank() != root) copy_bytes(place, slot, length);
    }
  });
}

void HostsCommunicator::run_all_to_all(const void*, const Parts&, void*, const Parts&, DType,
                                       std::int64_t, NativeStream) {
  refuse("all_to_all");
}

void HostsCommunicator::run_gather(const void*, void*, DType, std::int64_t, int, std::int64_t,
                                   NativeStream) {
  refuse("gather");
}

void HostsCommunicator::run_scatter(const void*, void*, DType, std::int64_t, int, std::int64_t,
                                    NativeStream) {
  refuse("scatter");
}

void HostsCommunicator::run_reduce(const void*, void*, DType, std::int64_t, RedOp, int,
                                   std::int64_t, NativeStream) {
  refuse("reduce");
}

void HostsCommunicator::refuse(const char* operation) const {
  throw std::invalid_argument(std::string("transport 'hosts' has no ") + operation +
                              "; call torch.distributed's, over Gloo, or MPI's");
}

}  // namespace shardcomm

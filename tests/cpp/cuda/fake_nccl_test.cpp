// The played NCCL does what its profile's sources do: collectives, configurations, groups, windows.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "fake_nccl_calls.h"

namespace {

using namespace calls;

void symbols_are_those_of_the_version(const Nccl& nccl) {
  require(nccl.has("ncclMemAlloc") == (nccl.version >= 21900), "ncclMemAlloc since 2.19");
  require(nccl.has("ncclCommRegister") == (nccl.version >= 21900), "ncclCommRegister since 2.19");
  require(nccl.has("ncclCommWindowRegister") == (nccl.version >= 22700), "windows since 2.27");
}

void collectives(const Nccl& nccl) {
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Comm comm = nccl.make(id, rank);
    Queue queue;
    require(gathered(nccl, comm, rank, queue) == 321, "gathered");
    std::vector<std::int32_t> parts{1, 2, 3};
    std::int32_t part = 0;
    nccl.reduce_scatter(parts.data(), &part, 1, i32, sum, comm, queue);
    std::vector<double> value{1.0 * rank, 2.0 * rank, -1.0 * rank, 5};
    nccl.all_reduce(value.data(), value.data(), 4, f64, max, comm, queue);
    float mean = static_cast<float>(rank);
    nccl.all_reduce(&mean, &mean, 1, f32, avg, comm, queue);
    std::int32_t whole = rank + 1;
    nccl.all_reduce(&whole, &whole, 1, i32, avg, comm, queue);
    std::int32_t at_root = -1;
    nccl.reduce(&parts[1], rank == 2 ? &at_root : nullptr, 1, i32, sum, 2, comm, queue);
    char letter = static_cast<char>('a' + rank);
    nccl.broadcast(&letter, &letter, 1, u8, 1, comm, queue);
    char from = 0;
    nccl.group_start();
    nccl.send(&letter, 1, u8, (rank + 1) % kRanks, comm, queue);
    nccl.recv(&from, 1, u8, (rank + kRanks - 1) % kRanks, comm, queue);
    require(nccl.group_end() == success, "a group");
    queue.finish();
    require(part == kRanks * (rank + 1), "reduced");
    require(value == std::vector<double>{2, 4, 0, 5}, "the greatest");
    require(std::abs(mean - 1) < 1e-6, "the mean");
    require(whole == 2, "the mean of integers");
    require(at_root == (rank == 2 ? 2 * kRanks : -1), "reduced to the root alone");
    require(letter == 'b' && from == 'b', "sent on");
    require(nccl.destroy(comm) == success, "destroyed");
  });
  require(nccl.counts().averages_premultiplied == kRanks, "the mean of floats is premultiplied");
  require_clean(nccl);
}

// A ring passes each share of n - 1 others to the next rank; a send goes to its receiver.
void bytes_are_counted_by_ranks(const Nccl& nccl) {
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Comm comm = nccl.make(id, rank);
    Queue queue;
    std::vector<float> all(kRanks * 8);
    std::vector<float> mine(8);
    nccl.all_gather(mine.data(), all.data(), 8, f32, comm, queue);
    nccl.reduce_scatter(all.data(), mine.data(), 8, f32, sum, comm, queue);
    queue.finish();
    nccl.group_start();
    if (rank == 0) nccl.send(mine.data(), 8, f32, 2, comm, queue);
    if (rank == 2) nccl.recv(mine.data(), 8, f32, 0, comm, queue);
    nccl.group_end();
    queue.finish();
    nccl.destroy(comm);
  });
  require(nccl.bytes(0, 1) == 2 * 2 * 32 && nccl.bytes(2, 0) == 2 * 2 * 32, "to the next");
  require(nccl.bytes(0, 2) == 32 && nccl.bytes(1, 0) == 0, "and to the receiver");
}

// Ring: bf16 rounds at each hop. 256 + 1 is 256 in bf16, however often.
void a_ring_rounds_at_each_hop(const Nccl& nccl) {
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Comm comm = nccl.make(id, rank);
    Queue queue;
    const std::uint16_t kOne = 0x3f80;
    const std::uint16_t k256 = 0x4380;
    std::vector<std::uint16_t> parts(kRanks, rank == 1 ? k256 : kOne);
    std::uint16_t mine = 0;
    nccl.reduce_scatter(parts.data(), &mine, 1, bf16, sum, comm, queue);
    queue.finish();
    // 256 first, or second: 256 + 1 + 1 = 256; last, as on rank 1's own part: 2 + 256 = 258.
    require(mine == (rank == 1 ? 0x4381 : k256), "rounded");
    nccl.destroy(comm);
  });
}

void configurations_are_checked(const Nccl& nccl) {
  const auto result = [&](const Config& config) {
    Comm comm = nullptr;
    Config given = config;
    const Result made = nccl.init(&comm, 1, nccl.id(), 0, &given);
    require((comm != nullptr) == (made == success), "no handle of a refused configuration");
    if (comm != nullptr) nccl.destroy(comm);
    return made;
  };
  Config config;
  require(result(config) == success, "2.27's is accepted by all");
  config.size = 48;
  config.version = 21801;
  require(result(config) == success, "2.18's is accepted by all");
  config.magic = 1;
  require(result(config) == invalid_argument, "not without the magic number");
  config = {};
  config.blocking = 2;
  require(result(config) == invalid_argument, "blocking is 0 or 1");
  config = {};
  config.cta_policy = 2;
  const bool refused = nccl.version >= 22700 && nccl.version < 22800;
  require(result(config) == (refused ? invalid_argument : success), "2.27 has no zero-CTA policy");
  require(nccl.counts().cta_policy == (nccl.version >= 22800 ? 2 : 0), "older ones do not see it");
}

void groups_nest_and_keep_errors(const Nccl& nccl) {
  require(nccl.group_end() == invalid_usage, "no group is open");
  Comm comm = nccl.make(nccl.id(), 0, 1);
  Queue queue;
  float value = 1;
  float result = 0;
  nccl.group_start();
  nccl.group_start();
  require(nccl.all_reduce(&value, &result, 1, f32, sum, comm, queue) == success, "collected");
  require(nccl.group_end() == success, "the inner end does nothing");
  queue.finish();
  require(result == 0, "nothing was launched");
  require(nccl.group_end() == success, "the outer one launches");
  queue.finish();
  require(result == 1, "launched");
  nccl.group_start();
  require(nccl.send(&value, 1, f32, 7, comm, queue) == invalid_argument, "no such peer");
  require(nccl.all_reduce(&value, &result, 1, f32, sum, comm, queue) == success, "collected");
  require(nccl.group_end() == invalid_argument, "the error is kept");
  nccl.destroy(comm);
}

void blocking_modes_do_not_mix(const Nccl& nccl) {
  Config config;
  Comm a = nullptr;
  Comm b = nullptr;
  nccl.group_start();
  require(nccl.init(&a, 1, nccl.id(), 0, &config) == success, "the first");
  config.blocking = 0;
  require(nccl.init(&b, 1, nccl.id(), 0, &config) == invalid_argument && b == nullptr, "not both");
  require(nccl.group_end() == invalid_argument, "the group fails");
  require(nccl.counts().mixed_modes == 1, "counted");
  nccl.abort(a);
}

struct Registered {
  Result result = success;
  void* window = nullptr;
  bool on_device = false;
};

Registered register_window(const Nccl& nccl, Comm comm, void* data, std::size_t bytes) {
  Registered made;
  made.result = nccl.window_register(comm, data, bytes, &made.window, 1);
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, made.window);
  made.on_device = attributes.type == cudaMemoryTypeDevice;
  return made;
}

void windows(const Nccl& nccl, FakeWindows support, bool cumem) {
  if (nccl.version < 22700) return;
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Comm comm = nccl.make(id, rank);
    void* data = nullptr;
    nccl.mem_alloc(&data, 1024);
    const Registered made = register_window(nccl, comm, data, 1024);
    require(made.result == success, "in any case");
    const bool symmetric = cumem && support == FakeWindows::symmetric;
    const bool structure = nccl.version < 22800;
    const bool handle = nccl.version < 22900;
    const bool local = support != FakeWindows::none && (cumem || !structure);
    require((made.window != nullptr) == (symmetric || (local && handle)), "what there is");
    require(made.on_device == (symmetric && !structure), "and where");
    void* buffer = nullptr;
    nccl.comm_register(comm, data, 1024, &buffer);
    require((buffer != nullptr) == (support != FakeWindows::none), "NCCL_LOCAL_REGISTER");

    Queue queue;
    const std::uint16_t kOne = 0x3f80;
    const std::uint16_t k256 = 0x4380;
    auto* parts = static_cast<std::uint16_t*>(data);
    for (int i = 0; i < kRanks; ++i) parts[i] = rank == 1 ? k256 : kOne;
    nccl.reduce_scatter(parts, parts + 64, 1, bf16, sum, comm, queue);
    nccl.all_gather(parts + 64, parts + 128, 1, bf16, comm, queue);
    queue.finish();
    if (symmetric) require(parts[64] == 0x4381, "symmetric kernels sum in fp32");
    require(nccl.comm_deregister(comm, buffer) == success, "deregistered");
    require(nccl.window_deregister(comm, made.window) == success, "deregistered");
    nccl.mem_free(data);
    nccl.destroy(comm);
  });
  const FakeNcclCounts counts = nccl.counts();
  const int expected = cumem && support == FakeWindows::symmetric ? kRanks : 0;
  require(counts.scatters_symmetric == expected && counts.gathers_symmetric == expected, "kernels");
  require(counts.windows_symmetric == expected, "windows");
  require_clean(nccl);
}

// Memory of NCCL's, registered or not.
class Memory {
 public:
  Memory(const Nccl& nccl, Comm comm, std::size_t bytes, bool registered)
      : nccl_(nccl), comm_(comm) {
    nccl.mem_alloc(&data_, bytes);
    if (registered) nccl.comm_register(comm, data_, bytes, &handle_);
  }
  ~Memory() {
    nccl_.comm_deregister(comm_, handle_);
    nccl_.mem_free(data_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  const Nccl& nccl_;
  Comm comm_;
  void* data_ = nullptr;
  void* handle_ = nullptr;
};

// Large messages, that is: small ones go by the protocol LL.
void messages_with_one_registered_side_never_end(const Nccl& nccl, std::size_t bytes) {
  if (nccl.version < 21900) return;
  const Id id = nccl.id();
  for (const bool sender : {true, false}) {
    on_ranks(
        [&](int rank) {
          Comm comm = nccl.make(id, rank, 2);
          {
            const Memory memory(nccl, comm, bytes, (rank == 0) == sender);
            Queue queue;
            rank == 0 ? nccl.send(memory.data(), bytes, u8, 1, comm, queue)
                      : nccl.recv(memory.data(), bytes, u8, 0, comm, queue);
            if (bytes > 16384) {
              while (nccl.counts().one_sided_messages < (sender ? 1 : 2)) std::this_thread::yield();
              nccl.abort(comm);
            }
            queue.finish();
            if (bytes > 16384) return;
          }
          nccl.destroy(comm);
        },
        2);
  }
  require(nccl.counts().one_sided_messages == (bytes > 16384 ? 2 : 0), "counted");
}

// A root whose `send` is not registered, where everything else is: garbage on the other ranks.
void broadcasts_with_one_registered_side_do_not_arrive(const Nccl& nccl) {
  if (nccl.version < 21900) return;
  constexpr std::size_t kBytes = 20000;
  const bool arrives = nccl.version >= 22900;
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Comm comm = nccl.make(id, rank);
    {
      const Memory memory(nccl, comm, kBytes, true);
      const Memory apart(nccl, comm, kBytes, false);
      memory.data()[7] = 'a';
      apart.data()[7] = 'b';
      Queue queue;
      const char* send = rank == 1 ? apart.data() : memory.data();
      nccl.broadcast(send, memory.data(), kBytes, u8, 1, comm, queue);
      queue.finish();
      require(memory.data()[7] == (rank == 1 || arrives ? 'b' : 'a'), "nothing is written");
      nccl.broadcast(memory.data(), memory.data(), kBytes, u8, 1, comm, queue);
      queue.finish();
      require(memory.data()[7] == 'b', "from registered memory it arrives");
    }
    nccl.destroy(comm);
  });
  require_clean(nccl);
}

void copy_engines_gather_on_demand(const Nccl& nccl) {
  if (nccl.version < 22800) return;
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Config config;
    config.cta_policy = 2;
    Comm comm = nccl.make(id, rank, kRanks, config);
    void* data = nullptr;
    nccl.mem_alloc(&data, 1024);
    void* window = nullptr;
    nccl.window_register(comm, data, 1024, &window, 1);
    auto* all = static_cast<float*>(data);
    Queue queue;
    nccl.all_gather(all + rank, all, 1, f32, comm, queue);
    nccl.all_gather(&rank, all, 1, f32, comm, queue);
    queue.finish();
    nccl.window_deregister(comm, window);
    nccl.mem_free(data);
    nccl.destroy(comm);
  });
  const int one_window = nccl.version >= 23000 ? kRanks : 0;
  require(nccl.counts().gathers_copy_engine == kRanks + one_window, "both in windows, until 2.30");
}

void registered_memory_is_watched(const Nccl& nccl) {
  if (nccl.version < 21900) return;
  Comm comm = nccl.make(nccl.id(), 0, 1);
  void* data = nullptr;
  void* handle = nullptr;
  nccl.mem_alloc(&data, 64);
  nccl.comm_register(comm, data, 64, &handle);
  void* again = nullptr;
  nccl.comm_register(comm, data, 32, &again);
  require(again == handle, "one handle for one range");
  require(nccl.comm_deregister(comm, handle) == success, "once");
  nccl.mem_free(data);
  require(nccl.counts().freed_while_registered == 1, "freed");
  nccl.destroy(comm);
  require(nccl.counts().registered_at_destroy == 1, "and left");
}

void faults_are_returned(const Nccl& nccl) {
  Comm comm = nccl.make(nccl.id(), 0, 1);
  FakeNccl faults;
  faults.fails = FakeCall::all_gather;
  faults.fails_with = remote_error;
  nccl.set(&faults);
  float value = 1;
  require(nccl.all_gather(&value, &value, 1, f32, comm, nullptr) == remote_error, "returned");
  nccl.destroy(comm);
}

void nothing_is_done_in_an_instant(const Nccl& nccl) {
  nccl.instant(1);
  Comm comm = nccl.make(nccl.id(), 0, 4);
  float value = 7;
  require(nccl.all_reduce(&value, &value, 1, f32, sum, comm, nullptr) == success, "at once");
  require(nccl.destroy(comm) == success && value == 7, "without peers or effect");
  nccl.instant(0);
}

}  // namespace

int main(int, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const Nccl nccl(arguments[1]);
  std::printf("NCCL %d\n", nccl.version);
  run("symbols", nccl, symbols_are_those_of_the_version);
  run("collectives", nccl, collectives);
  run("bytes", nccl, bytes_are_counted_by_ranks);
  run("rounding", nccl, a_ring_rounds_at_each_hop);
  run("configurations", nccl, configurations_are_checked);
  run("groups", nccl, groups_nest_and_keep_errors);
  run("modes", nccl, blocking_modes_do_not_mix);
  for (const auto support : {FakeWindows::none, FakeWindows::local, FakeWindows::symmetric}) {
    for (const bool cumem : {true, false}) {
      FakeNccl faults;
      faults.windows = support;
      faults.cumem = cumem;
      run("windows", nccl, [&](const Nccl& each) { windows(each, support, cumem); }, faults);
    }
  }
  run("copy engines", nccl, copy_engines_gather_on_demand);
  run("registered memory", nccl, registered_memory_is_watched);
  for (const std::size_t bytes : {16384, 20000}) {
    run("one-sided messages", nccl,
        [&](const Nccl& each) { messages_with_one_registered_side_never_end(each, bytes); });
  }
  run("one-sided broadcasts", nccl, broadcasts_with_one_registered_side_do_not_arrive);
  run("faults", nccl, faults_are_returned);
  run("instant", nccl, nothing_is_done_in_an_instant);
  std::puts("good");
  return 0;
}

// Collectives between ranks. One interface; `shm` (processes of one host) and `local` (threads of
// one process) implement it here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shardcomm/dtype.h"
#include "shardcomm/error.h"
#include "shardcomm/parts.h"
#include "shardcomm/reduce.h"
#include "shardcomm/stream.h"

namespace shardcomm {

// What communication memory is for. A gather buffer receives every rank's shard; a reduce buffer
// holds this rank's contribution for every rank. On shared memory the first is one window that all
// ranks map (so an all-gather into it moves each byte once), the second one region per rank that
// the others can read.
enum class Use : std::uint8_t { gather, reduce };

// Communication memory. Valid until the last owner lets go of it, also after the communicator
// failed or closed.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* data() const = 0;
  virtual std::size_t bytes() const = 0;
  virtual int device() const { return -1; }  // the CUDA device it is on; -1: the host
};

// How the last collective of a kind went. `requested` is the fastest path the transport knows,
// `taken` the one it took; when they differ `reason` is the sentence why.
struct Receipt {
  std::string operation;
  std::uint64_t sequence = 0;
  std::string requested;
  std::string taken;
  std::string reason;
};

// What a rank is in: a collective that it has called and that has not ended well, or none.
struct Pending {
  int rank = 0;
  std::int32_t pid = 0;             // 0: a thread of this process, or not known yet
  std::string channel;              // "gather" or "reduce"; empty: it is in no collective
  std::string call;                 // "all_gather(f32, count 4)"
  std::uint64_t sequence = 0;       // among the calls of its channel, from 1
  std::optional<double> waiting_s;  // nothing: it does not wait, or its group has failed
  std::vector<int> waits_for;       // ranks that have not come, or had not when the group failed
};

// All collectives are called by every rank in the same order, and throw CommError on every
// surviving rank when one rank died, called something else, or did not come in time. On a CPU they
// block until this rank's part is complete, and take no notice of `stream`; on a device they put it
// on `stream` and return. Gathers (all_gather, broadcast, barrier, allocate(gather)) and reduces
// (reduce_scatter, all_reduce, allocate(reduce)) are two independent channels: one of each may run
// at once, from two threads.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string transport() const = 0;  // "shm", "local", ...

  // Collective. Zero-filled, at least 128-byte aligned. Throws CommError, on all ranks, when
  // there is not so much memory.
  virtual std::shared_ptr<Memory> allocate(std::size_t bytes, Use use) = 0;

  // recv[parts.begin(r) + i] = convert(send of rank r [i]), for parts.count(r) elements of each
  // rank r. In place when `send` is recv + parts.begin(rank) and the dtypes agree. Ranks that pass
  // different tags called different collectives: what tells two gathers of the same size apart.
  virtual void all_gather(const void* send, DType send_dtype, void* recv, DType recv_dtype,
                          const Parts& parts, std::int64_t tag = 0,
                          NativeStream stream = nullptr) = 0;

  // recv[i] = epilogue(send of rank 0 [parts.begin(rank) + i] op send of rank 1 [the same] op ...).
  virtual void reduce_scatter(const void* send, DType dtype, void* recv, const Epilogue& epilogue,
                              const Parts& parts, RedOp op, std::int64_t tag = 0,
                              NativeStream stream = nullptr) = 0;

  // In place; bitwise the same on every rank.
  virtual void all_reduce(void* buffer, DType dtype, std::int64_t count, RedOp op,
                          std::int64_t tag = 0, NativeStream stream = nullptr) = 0;
  virtual void broadcast(void* buffer, std::size_t bytes, int root,
                         NativeStream stream = nullptr) = 0;
  // `tag` as in all_gather.
  virtual void barrier(std::int64_t tag = 0, NativeStream stream = nullptr) = 0;

  // What sentences about calls with this tag say instead of the number, such as "unit 'blocks.3'".
  // The same on every rank, once for each tag, from 2^32 on.
  virtual void name_tag(std::int64_t tag, const std::string& name) = 0;

  // Makes every rank's present and later collectives throw CommError with this reason. Any thread
  // may call it.
  virtual void abort(const std::string& reason) noexcept = 0;
  // Leaves the group. Ranks that wait for this one, or will, get CommError. Idempotent.
  virtual void close() noexcept = 0;

  // Throws CommError if it has failed or was closed: on a device, work that was aborted ends too,
  // and only this tells it from work that was done.
  virtual void check() const {}

  virtual std::vector<Receipt> receipts() const = 0;  // the latest of each operation
  // What each rank is in, in the order of ranks: `shm` and `local` tell all ranks', a transport
  // that cannot see the others tells this one's. Any thread may ask, also while this rank is in a
  // collective and after a failure; nobody is stopped by it.
  virtual std::vector<Pending> pending() const = 0;
};

struct CommOptions {
  double deadline_s = 300.0;  // longest wait for another rank inside one collective
};

// `size` communicators of one process, for one thread each; on one CUDA device, or on the CPU (-1).
// Throws CudaError if there is no such device.
std::vector<std::shared_ptr<Communicator>> make_local_group(int size,
                                                            const CommOptions& options = {},
                                                            int device = -1);

// Names a process for good: its number may be given to another, but not with the same start.
struct ProcessId {
  std::int32_t pid = 0;
  std::uint64_t start = 0;  // in clock ticks since the machine's; field 22 of /proc/PID/stat

  static ProcessId own();
};

// Processes of one host. Any process, rank 0 or a launcher, creates a session and sends `address()`
// to the ranks by any means; it lives until all ranks have attached. Nothing gets a name in the
// file system: memory is anonymous, and found through the process that made it.
class ShmSession {
 public:
  // `processes`: the ranks', if they are known, one for each. The death of one that has not
  // attached yet is then noticed at once by those that have; else by their deadline.
  explicit ShmSession(int size, const std::vector<ProcessId>& processes = {});
  ~ShmSession();
  std::string address() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// A rank's place in a session: its memory is mapped, and the others have not heard of this rank
// yet.
class ShmMember {
 public:
  // Throws CommError if this process cannot reach the session's memory.
  ShmMember(const std::string& address, int rank, int size);
  ShmMember(ShmMember&&) noexcept;
  ~ShmMember();
  // Collective: returns when all ranks have attached. Throws CommError, on all ranks, if one died,
  // did not come in time, or cannot tell when another one's process ends.
  std::shared_ptr<Communicator> attach(const CommOptions& options = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Both in one. Collective.
std::shared_ptr<Communicator> make_shm(const std::string& address, int rank, int size,
                                       const CommOptions& options = {});

}  // namespace shardcomm

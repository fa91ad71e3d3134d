// Collectives between ranks: one interface, and what makes `shm` (processes of one host) and
// `local` (threads of one process). hosts.h and nccl.h make the other transports.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shardcomm/coding.h"
#include "shardcomm/dtype.h"
#include "shardcomm/error.h"
#include "shardcomm/parts.h"
#include "shardcomm/reduce.h"
#include "shardcomm/stream.h"

namespace shardcomm {

class Mailbox;

// What communication memory is for. A gather buffer receives every rank's shard; a reduce buffer
// holds this rank's contribution for every rank. On shared memory a gather buffer is one window
// that all ranks map, so that an all-gather into it moves each byte once. A reduce buffer is one
// region for each rank, which the other ranks can read.
enum class Use : std::uint8_t { gather, reduce };

// Communication memory. It is valid until its last owner releases it, also after the communicator
// has failed or was closed.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* data() const = 0;
  virtual std::size_t bytes() const = 0;
  virtual int device() const { return -1; }  // the CUDA device it is on; -1: the host
};

// The ranks that have one buffer of gather memory in common, so that what one writes there all can
// read: this rank's number among them, and how many they are.
struct Sharers {
  int index = 0;
  int size = 1;
};

// Which path the last collective of a kind took. `requested` is the fastest path that the transport
// knows, and `taken` the path that the collective took. If they differ, `reason` is a sentence that
// says why.
struct Receipt {
  std::string operation;
  std::uint64_t sequence = 0;
  std::string requested;
  std::string taken;
  std::string reason;
};

// A call of a rank that has not ended well, or none.
struct Pending {
  int rank = 0;
  std::int32_t pid = 0;  // 0: the rank is a thread of this process, or not known yet
  // "gather", "reduce" or, for a send or a receive in which the rank is asleep, "message"; empty:
  // the rank is in none of them.
  std::string channel;
  std::string call;                 // "all_gather(f32, count 4)"
  std::uint64_t sequence = 0;       // the call's number in its channel, from 1 on
  std::optional<double> waiting_s;  // nothing: the rank does not wait, or its group has failed
  // Ranks that have not come, or had not come when the group failed. Of other hosts: those with
  // which the rank exchanges, some of which have not come.
  std::vector<int> waits_for;
};

// Every rank calls the same collectives in the same order. If a rank dies, calls something else, or
// does not come in time, the collective throws CommError on every surviving rank. On a CPU a
// collective blocks until this rank's part is complete, and ignores `stream`; on a device it puts
// the work on `stream` and returns. Gathers (all_gather, all_to_all, gather, scatter, broadcast,
// barrier, allocate(gather)) and reduces (reduce_scatter, all_reduce, reduce, allocate(reduce)) are
// two independent channels: one of each may run at once, from two threads.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string transport() const = 0;  // "shm", "local", ...
  // Whether sums and averages are exact_sum and exact_avg of reduce.h.
  virtual bool exact_sums() const { return false; }

  // Whether partial sums cross between hosts, and so can be coded.
  virtual bool codes_reduces() const { return false; }

  // Collective. The memory is zero-filled, and aligned to at least 128 bytes. Throws CommError, on
  // all ranks, if there is not enough memory.
  virtual std::shared_ptr<Memory> allocate(std::size_t bytes, Use use) = 0;

  // The ranks that have all of this buffer in common; this rank alone where it is its own memory,
  // and on a device.
  virtual Sharers sharers(const void* buffer, std::size_t bytes) const;

  // recv[parts.begin(r) + i] = convert(send of rank r [i]), for parts.count(r) elements of each
  // rank r. It is in place if `send` is recv + parts.begin(rank) and the dtypes agree. A tag tells
  // two gathers of the same size apart: ranks that pass different tags have called different
  // collectives. Throws std::invalid_argument for arguments that do not fit each other.
  void all_gather(const void* send, DType send_dtype, void* recv, DType recv_dtype,
                  const Parts& parts, std::int64_t tag = 0, NativeStream stream = nullptr);

  // recv[i] = epilogue(send of rank 0 [parts.begin(rank) + i] op send of rank 1 [the same] op ...).
  void reduce_scatter(const void* send, DType dtype, void* recv, const Epilogue& epilogue,
                      const Parts& parts, RedOp op, std::int64_t tag = 0,
                      NativeStream stream = nullptr);

  // In place; the result is the same on every rank, bit for bit.
  void all_reduce(void* buffer, DType dtype, std::int64_t count, RedOp op, std::int64_t tag = 0,
                  NativeStream stream = nullptr);
  // Of few bytes (docs/protocol.md) the root waits for nobody: if another rank calls something
  // else, that one throws, and the root in its next call.
  void broadcast(void* buffer, DType dtype, std::int64_t count, int root,
                 NativeStream stream = nullptr);
  // `tag` as in all_gather.
  void barrier(std::int64_t tag = 0, NativeStream stream = nullptr);

  // `send` has a part for each rank, one after another, and `recv` gets one of each rank: rank r's
  // part of rank s's `send` becomes s's part of r's `recv`. Both must give it the same length; if
  // not, all ranks throw CommError. Neither may lie in memory that all ranks share.
  void all_to_all(const void* send, const Parts& send_parts, void* recv, const Parts& recv_parts,
                  DType dtype, std::int64_t tag = 0, NativeStream stream = nullptr);
  // On the root, `recv` gets the `count` elements of each rank's `send`, in the order of ranks, and
  // may not lie in memory that all ranks share. Others' `recv` is ignored. In place, the root's
  // `send` is its part of `recv`.
  void gather(const void* send, void* recv, DType dtype, std::int64_t count, int root,
              std::int64_t tag = 0, NativeStream stream = nullptr);
  // The same in the other direction: `recv` of rank r gets the part r of the root's `send`, which
  // has `count` elements.
  void scatter(const void* send, void* recv, DType dtype, std::int64_t count, int root,
               std::int64_t tag = 0, NativeStream stream = nullptr);
  // `recv` of the root, which may be its `send`, gets what all_reduce would leave there, bit for
  // bit. Others' `recv` is ignored.
  void reduce(const void* send, void* recv, DType dtype, std::int64_t count, RedOp op, int root,
              std::int64_t tag = 0, NativeStream stream = nullptr);

  // The same collectives, bound to their arguments, which are checked here and never again. Call
  // the result with a stream, or enqueue it on a Stream, as often as you like. It keeps `comm`
  // alive, and not the buffers, which must outlive the last call.
  //
  // With a `coding` a reduce-scatter's partial sums cross between hosts as it says. `dtype` is f32,
  // bf16 or f16 then; std::invalid_argument if the transport has no partial sums of hosts.
  // Stochastic rounding takes other random numbers in each call, and the same ones in each run of a
  // program.
  static Stream::Operation bind_all_gather(std::shared_ptr<Communicator> comm, const void* send,
                                           DType send_dtype, void* recv, DType recv_dtype,
                                           const Parts& parts, std::int64_t tag = 0);
  static Stream::Operation bind_reduce_scatter(std::shared_ptr<Communicator> comm, const void* send,
                                               DType dtype, void* recv, const Epilogue& epilogue,
                                               const Parts& parts, RedOp op, std::int64_t tag = 0,
                                               const std::optional<Coding>& coding = {});
  static Stream::Operation bind_all_reduce(std::shared_ptr<Communicator> comm, void* buffer,
                                           DType dtype, std::int64_t count, RedOp op,
                                           std::int64_t tag = 0);
  static Stream::Operation bind_broadcast(std::shared_ptr<Communicator> comm, void* buffer,
                                          DType dtype, std::int64_t count, int root);
  static Stream::Operation bind_barrier(std::shared_ptr<Communicator> comm, std::int64_t tag = 0);
  // The operation returns when all sharers of the buffer have come: each of them has written its
  // share, and all can read all of it. It takes its turn among the gathers of all ranks.
  static Stream::Operation bind_sharing(std::shared_ptr<Communicator> comm, const void* buffer,
                                        std::size_t bytes, std::int64_t tag = 0);
  static Stream::Operation bind_all_to_all(std::shared_ptr<Communicator> comm, const void* send,
                                           const Parts& send_parts, void* recv,
                                           const Parts& recv_parts, DType dtype,
                                           std::int64_t tag = 0);
  static Stream::Operation bind_gather(std::shared_ptr<Communicator> comm, const void* send,
                                       void* recv, DType dtype, std::int64_t count, int root,
                                       std::int64_t tag = 0);
  static Stream::Operation bind_scatter(std::shared_ptr<Communicator> comm, const void* send,
                                        void* recv, DType dtype, std::int64_t count, int root,
                                        std::int64_t tag = 0);
  static Stream::Operation bind_reduce(std::shared_ptr<Communicator> comm, const void* send,
                                       void* recv, DType dtype, std::int64_t count, RedOp op,
                                       int root, std::int64_t tag = 0);

  // Messages between two ranks, of `shm` and of `local` on a CPU: comm/mailbox.h. Throws
  // std::invalid_argument, which says what to call instead, where there are none.
  virtual Mailbox& mailbox();

  // Gives a tag a name, such as "unit 'blocks.3'", which sentences about calls then say instead of
  // the number. Call it once for each tag, with the same name on every rank; such tags begin at
  // 2^32.
  virtual void name_tag(std::int64_t tag, const std::string& name) = 0;

  // Makes every rank's present and later collectives throw CommError with this reason. Any thread
  // may call it.
  virtual void abort(const std::string& reason) noexcept = 0;
  // Leaves the group. Ranks that wait for this one, or will, get CommError. Idempotent.
  virtual void close() noexcept = 0;

  // Throws CommError if the communicator has failed or was closed. On a device, work that was
  // aborted ends, too, and only this call tells it from work that was done.
  virtual void check() const = 0;

  virtual std::vector<Receipt> receipts() const = 0;  // the latest of each operation
  // The collectives that ranks are in, in the order of ranks. `shm` and `local` know of all ranks;
  // a transport that cannot see the other ranks knows of this one. Any thread may ask, also while
  // this rank is in a collective, and after a failure. No rank is stopped by it.
  virtual std::vector<Pending> pending() const = 0;

 protected:
  // The collectives, whose arguments have been checked.
  virtual void run_all_gather(const void* send, DType send_dtype, void* recv, DType recv_dtype,
                              const Parts& parts, std::int64_t tag, NativeStream stream) = 0;
  virtual void run_reduce_scatter(const void* send, DType dtype, void* recv,
                                  const Epilogue& epilogue, const Parts& parts, RedOp op,
                                  std::int64_t tag, NativeStream stream) = 0;
  virtual void run_coded_reduce_scatter(const void* send, DType dtype, void* recv,
                                        const Epilogue& epilogue, const Parts& parts, RedOp op,
                                        std::int64_t tag, const Coding& coding);
  virtual void run_sharing(const void* buffer, std::size_t bytes, std::int64_t tag);
  virtual void run_all_reduce(void* buffer, DType dtype, std::int64_t count, RedOp op,
                              std::int64_t tag, NativeStream stream) = 0;
  virtual void run_broadcast(void* buffer, DType dtype, std::int64_t count, int root,
                             NativeStream stream) = 0;
  virtual void run_barrier(std::int64_t tag, NativeStream stream) = 0;
  virtual void run_all_to_all(const void* send, const Parts& send_parts, void* recv,
                              const Parts& recv_parts, DType dtype, std::int64_t tag,
                              NativeStream stream) = 0;
  virtual void run_gather(const void* send, void* recv, DType dtype, std::int64_t count, int root,
                          std::int64_t tag, NativeStream stream) = 0;
  virtual void run_scatter(const void* send, void* recv, DType dtype, std::int64_t count, int root,
                           std::int64_t tag, NativeStream stream) = 0;
  virtual void run_reduce(const void* send, void* recv, DType dtype, std::int64_t count, RedOp op,
                          int root, std::int64_t tag, NativeStream stream) = 0;
};

struct CommOptions {
  double deadline_s = 300.0;  // longest wait for another rank inside one collective, in seconds
  // Sums and averages of floats are exact before they are rounded, once: exact_sum and exact_avg of
  // reduce.h. It must be the same on all ranks, whose calls do not match otherwise, and is for
  // memory of the host alone.
  bool exact_sums = false;
};

// Makes `size` communicators for as many threads of this process, on one CUDA device, or on the CPU
// (-1). Throws CudaError if there is no such device, and std::invalid_argument for exact sums on a
// device.
std::vector<std::shared_ptr<Communicator>> make_local_group(int size,
                                                            const CommOptions& options = {},
                                                            int device = -1);

// Names a process for good: another process may get its number, but not with the same start.
struct ProcessId {
  std::int32_t pid = 0;
  std::uint64_t start = 0;  // in clock ticks since the machine's start: field 22 of /proc/PID/stat

  static ProcessId own();
};

// The start of a group of processes of one host. Any process, rank 0 or a launcher, creates a
// session and sends `address()` to the ranks by any means. The session must live until all ranks
// have attached. Nothing gets a name in the file system: memory is anonymous, and ranks find it
// through the process that made it.
class ShmSession {
 public:
  // `processes`: the process of each rank, if they are known. If one dies before it has attached,
  // the ranks that have attached then notice that at once; otherwise they notice it at their
  // deadline.
  explicit ShmSession(int size, const std::vector<ProcessId>& processes = {});
  ~ShmSession();
  std::string address() const;
  // Whether all ranks have attached. They have mapped the session's memory then, and need the
  // session no more.
  bool is_complete() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// A rank's place in a session. Its memory is mapped, and the other ranks have not heard of this
// rank yet.
class ShmMember {
 public:
  // Throws CommError if this process cannot reach the session's memory.
  ShmMember(const std::string& address, int rank, int size);
  ShmMember(ShmMember&&) noexcept;
  ~ShmMember();
  // Collective: returns when all ranks have attached. Throws CommError, on all ranks, if a rank
  // died, did not come in time, or cannot tell when another rank's process ends.
  std::shared_ptr<Communicator> attach(const CommOptions& options = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Makes a ShmMember and attaches it. Collective.
std::shared_ptr<Communicator> make_shm(const std::string& address, int rank, int size,
                                       const CommOptions& options = {});

}  // namespace shardcomm

// The C interface of shardcomm, for programs in C and for every language that can call C.
//
//   shc_unique_id id;                                       // rank 0 makes it, and sends its bytes
//   shc_get_unique_id(SHC_SHM, size, &id);                  // to the other ranks by any means
//
//   shc_comm* comm;                                         // every rank
//   shc_comm_init_rank(&comm, size, &id, rank, NULL);
//   shc_all_gather(comm, shard, SHC_F32, full, SHC_F32, count, NULL, NULL);
//   shc_comm_destroy(comm);
//
// Every function that can fail returns a shc_status. No exception leaves this library, and it ends
// the process in one case alone: over SHC_NCCL, if a collective is still on the GPU a deadline
// after NCCL was told to abort it. What went wrong stands in shc_last_error, for the thread that
// called. Any thread may call any function, but no signal handler may. A thread that is cancelled
// (pthread_cancel) in a call ends after it. A forked child cannot use its parent's communicators
// and streams.
//
// Handles are opaque. A function that makes one writes it to its last argument, or to its first as
// NCCL's functions do, and the matching `destroy` function takes it; destroying NULL does nothing.
// A handle that is destroyed must be in no other thread's call, and must not be used again. NULL
// and a handle of another kind are refused. Handles keep what they are made of: a collective keeps
// its communicator, and a copy its plan. Buffers belong to the caller, and must be valid until the
// work that uses them has ended.
//
// Structs that may grow begin with their size and the version of the header, which the `INIT`
// macros fill in. Later versions of this library add fields at their ends, where zero means what an
// older program meant. So a program runs with any later library of the same major version.
//
// The collectives are those of `shardcomm.Communicator` in Python: every rank calls the same ones
// in the same order, and if a rank dies, calls something else or does not come in time, every
// surviving rank gets SHC_COMM_ERROR. Gathers (all_gather, all_to_all, gather, scatter, broadcast,
// barrier, and memory for SHC_GATHER) and reduces (reduce_scatter, all_reduce, reduce, and memory
// for SHC_REDUCE) are two channels: one of each may run at once, from two threads or on two
// streams.
#ifndef SHARDCOMM_H_
#define SHARDCOMM_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SHC_API __attribute__((visibility("default")))

// In C++ any int is a value of these enumerations, so that this library can refuse a wrong one.
#if defined(__cplusplus) && __cplusplus >= 201103L
#define SHC_ENUM_BASE : int
#else
#define SHC_ENUM_BASE
#endif

// 10000 * major + 100 * minor + patch.
#define SHC_VERSION 100

// The version of the library that is loaded, counted as SHC_VERSION is.
SHC_API int shc_version(void);

// ---- Status and errors ----

typedef enum shc_status SHC_ENUM_BASE {
  SHC_OK = 0,
  SHC_NOT_READY = 1,         // an event has not fired; this is no error
  SHC_INVALID_ARGUMENT = 2,  // a caller's mistake; nothing was done
  SHC_COMM_ERROR = 3,        // trouble between ranks; the communicator only fails from now on
  SHC_CUDA_ERROR = 4,        // trouble with the device, or there is none
  SHC_OUT_OF_MEMORY = 5,
  SHC_INTERNAL_ERROR = 6,  // anything else: a mistake of this library
  SHC_INTERRUPTED = 7      // the thread's wait check has ended a wait
} shc_status;

// A status as people say it: "invalid argument". Never NULL.
SHC_API const char* shc_status_name(shc_status status);

// The last error of the calling thread. The strings are valid until this thread's next error, or
// its end.
typedef struct shc_error {
  size_t size;
  int version;
  shc_status status;  // SHC_OK: this thread has had no error
  const char* text;   // a sentence that names the function and the argument, or the rank; or ""
  // The rest is for SHC_COMM_ERROR.
  const char* kind;       // "died", "late", "mismatch", "closed", "aborted" or "backend"; else ""
  int rank;               // the rank whose fault it is; -1: nobody's alone, or not known
  int reporter;           // the rank that noticed; -1: not known
  const char* operation;  // the collective that this rank was in, or "send" or "recv"; "": in none
  uint64_t sequence;      // its number in its channel, or among the rank's messages, from 1 on
} shc_error;

#define SHC_ERROR_INIT {sizeof(shc_error), SHC_VERSION, SHC_OK, "", "", -1, -1, "", 0}

// Fills in `error`. It changes nothing else, and clears nothing. Where it refuses `error`
// (SHC_INVALID_ARGUMENT), the thread's last error stays the one before.
SHC_API shc_status shc_last_error(shc_error* error);
// The sentence alone. Never NULL.
SHC_API const char* shc_last_error_text(void);

// What long waits of a thread's calls run about every 50 ms, for instance to see whether a signal
// has come. Anything but 0 ends the wait: the call fails with SHC_INTERRUPTED. If it is a
// collective, this rank does not come any more, and the group fails for the others. Other waits
// harm nobody: shc_send and shc_recv cancel their message, and shc_request_wait, shc_wait_any and
// shc_event_wait leave what they wait for under way. It may not call this library.
typedef int (*shc_wait_check)(void* context);

// Sets the calling thread's check. NULL: none, as at the start.
SHC_API shc_status shc_set_wait_check(shc_wait_check check, void* context);

// Sets the longest wait for other ranks in the calling thread's collectives and messages, in
// seconds, in place of the deadline_s of their groups. 0: the groups' hold, as at the start. A call
// on a stream keeps its group's, and so does every call of SHC_NCCL.
SHC_API shc_status shc_set_deadline(double deadline_s);
// What the calling thread has set. Inside an shc_across callback: the deadline of the collective
// that called it.
SHC_API shc_status shc_get_deadline(double* deadline_s);

// ---- Element types ----

// Other types of the same size travel as these, where they are only moved.
typedef enum shc_dtype SHC_ENUM_BASE {
  SHC_U8 = 0,
  SHC_I32 = 1,
  SHC_I64 = 2,
  SHC_F16 = 3,
  SHC_BF16 = 4,
  SHC_F32 = 5,
  SHC_F64 = 6,
  SHC_I8 = 7
} shc_dtype;

// The bytes of an element; 0 for a number that is no shc_dtype.
SHC_API size_t shc_dtype_size(shc_dtype dtype);
// "f32"; NULL for a number that is no shc_dtype.
SHC_API const char* shc_dtype_name(shc_dtype dtype);

// ---- Layouts: where every element of a unit's parameters lives ----

typedef struct shc_layout shc_layout;

// A parameter of rows * row_elements elements. A boundary between two ranks may fall between
// granules of `granule_rows` rows. If the parameter has no more rows than that, one rank owns it.
// This struct never changes.
typedef struct shc_param {
  int64_t rows;
  int64_t row_elements;
  int64_t granule_rows;
} shc_param;

// A range of a parameter that lies on one rank. This struct never changes.
typedef struct shc_piece {
  int64_t param_begin;  // the first element, counted in the parameter
  int64_t shard_begin;  // the same element, counted in the rank's shard
  int64_t count;        // how many elements; 0: the rank has none of this parameter
} shc_piece;

// Plans where `count` parameters lie, one after another in the flat buffer of all ranks, of which
// each rank holds an equally long shard. Every parameter begins at a multiple of `align_elements`.
SHC_API shc_status shc_layout_plan(const shc_param* params, size_t count, int world_size,
                                   int64_t align_elements, shc_layout** layout);
SHC_API void shc_layout_destroy(shc_layout* layout);

SHC_API shc_status shc_layout_param_count(const shc_layout* layout, size_t* count);
SHC_API shc_status shc_layout_world_size(const shc_layout* layout, int* world_size);
// The length of each rank's shard, in elements; the flat buffer has world_size times as many.
SHC_API shc_status shc_layout_shard_elements(const shc_layout* layout, int64_t* elements);
// Where a parameter begins in the flat buffer, in elements.
SHC_API shc_status shc_layout_offset(const shc_layout* layout, size_t param, int64_t* offset);
// Which elements of a parameter a rank holds.
SHC_API shc_status shc_layout_piece(const shc_layout* layout, size_t param, int rank,
                                    shc_piece* piece);

// Writes the layout as JSON text with a 0 at its end. `*bytes` is the room that `text` has, and
// becomes the room that is needed, the 0 included. If that is more, or `text` is NULL, nothing is
// written, and the status of a `text` that is too small is SHC_INVALID_ARGUMENT.
SHC_API shc_status shc_layout_serialize(const shc_layout* layout, char* text, size_t* bytes);
// Reads what shc_layout_serialize has written.
SHC_API shc_status shc_layout_deserialize(const char* text, shc_layout** layout);

// ---- Streams and events ----

// A stream runs its operations in order. Where a function takes a stream, NULL means: on a CPU now,
// in the calling thread; on a CUDA device its default stream.
typedef struct shc_stream shc_stream;
// A point of a stream.
typedef struct shc_event shc_event;

// A stream that is a worker thread of this process, for communication on a CPU. Its `destroy` waits
// until all its operations have ended.
SHC_API shc_status shc_stream_create_thread(shc_stream** stream);
// A CUDA stream (cudaStream_t) of the caller's. The caller destroys it, after this handle.
SHC_API shc_status shc_stream_borrow_cuda(int device, void* cuda_stream, shc_stream** stream);
SHC_API void shc_stream_destroy(shc_stream* stream);

// Makes an event that fires when the operations that the stream has been given so far have ended.
SHC_API shc_status shc_stream_record(shc_stream* stream, shc_event** event);
// Makes later operations of the stream start after the event.
SHC_API shc_status shc_stream_wait(shc_stream* stream, const shc_event* event);

// SHC_OK: it has fired. SHC_NOT_READY: it has not. It never blocks, and tells no failure.
SHC_API shc_status shc_event_query(const shc_event* event);
// Waits until the event has fired, at most `timeout_s` seconds (negative: without end). SHC_OK: the
// operations before it have ended well. SHC_NOT_READY: it has not fired in time. SHC_INTERRUPTED:
// the thread's wait check ended the wait, and the operations go on. Anything else is the failure of
// an operation on a thread stream; the operations after that were dropped.
SHC_API shc_status shc_event_wait(const shc_event* event, double timeout_s);
SHC_API void shc_event_destroy(shc_event* event);

// ---- Copy plans: which rectangles move where ----

typedef struct shc_copy_plan shc_copy_plan;
typedef struct shc_copy shc_copy;

// Copies rows x cols elements. Offsets and pitches (the distance from one row to the next) count
// elements of their own side's dtype. `src` SHC_ZEROS writes zeros. This struct never changes.
#define SHC_ZEROS (-1)
typedef struct shc_segment {
  int32_t src;  // which source
  int32_t dst;  // which destination
  int64_t src_offset;
  int64_t src_pitch;
  int64_t dst_offset;
  int64_t dst_pitch;
  int64_t rows;
  int64_t cols;
} shc_segment;

// Compiles segments, once. Destinations of different segments must not overlap. SHC_F32, SHC_BF16
// and SHC_F16 convert to one another, and other dtypes are copied as they are.
SHC_API shc_status shc_copy_plan_create(const shc_segment* segments, size_t count,
                                        shc_dtype src_dtype, shc_dtype dst_dtype,
                                        shc_copy_plan** plan);
SHC_API void shc_copy_plan_destroy(shc_copy_plan* plan);
// How many sources and destinations the plan has.
SHC_API shc_status shc_copy_plan_operands(const shc_copy_plan* plan, size_t* sources,
                                          size_t* destinations);
// How many elements each of them must have: one number for each source, then for each destination.
SHC_API shc_status shc_copy_plan_extents(const shc_copy_plan* plan, int64_t* source_elements,
                                         int64_t* destination_elements);

typedef struct shc_copy_options {
  size_t size;
  int version;
  float scale;     // dst = convert(scale * src)
  int accumulate;  // not 0: dst = convert(dst + scale * src)
  int32_t*
      nonfinite;  // is set to 1 if an element that was written is NaN or Inf; NULL: nobody asks
} shc_copy_options;

#define SHC_COPY_OPTIONS_INIT {sizeof(shc_copy_options), SHC_VERSION, 1.0f, 0, NULL}

#define SHC_HOST (-1)

// Binds a plan to its pointers, one for each source and each destination. A NULL source stands for
// zeros; every other one is a multiple of its elements' size. `device`: SHC_HOST, where `threads`
// threads copy, or the CUDA device that has the memory.
SHC_API shc_status shc_copy_bind(const shc_copy_plan* plan, const void* const* sources,
                                 void* const* destinations, int threads, int device,
                                 shc_copy** copy);
// Copies. `options` NULL: SHC_COPY_OPTIONS_INIT.
SHC_API shc_status shc_copy_run(const shc_copy* copy, const shc_copy_options* options,
                                shc_stream* stream);
SHC_API void shc_copy_destroy(shc_copy* copy);

// ---- Block formats: elements of 8 bits that share a scale ----

// A block of 32, 64 or 128 elements has one byte for each and one for their scale, after the OCP
// Microscaling specification (MX) 1.0: a quarter of float32's bytes. shardcomm/blocks.h in the
// sources defines the formats to the bit.
typedef enum shc_block_code SHC_ENUM_BASE {
  SHC_MXINT8 = 0,  // steps are equal throughout a block
  SHC_MXFP8 = 1    // E4M3: steps grow with the element
} shc_block_code;

typedef enum shc_rounding SHC_ENUM_BASE {
  SHC_NEAREST = 0,    // ties to even
  SHC_STOCHASTIC = 1  // at random, so that the mean over seeds is the element
} shc_rounding;

// This struct never changes.
typedef struct shc_block_format {
  shc_block_code code;
  int block;  // how many elements share a scale: 32, 64 or 128
  shc_rounding rounding;
} shc_block_format;

// `count` elements that stand in the blocks of the wire from `first_block` on. The last of these
// blocks may be partial. These structs never change.
typedef struct shc_encoded_segment {
  const void* src;
  int64_t count;
  int64_t first_block;
} shc_encoded_segment;
typedef struct shc_decoded_segment {
  void* dst;
  int64_t count;
  int64_t first_block;
} shc_decoded_segment;

// What encoding has cost. Each call that is given it raises the first two and adds to the third.
// This struct never changes.
typedef struct shc_block_stats {
  float bound;      // the most by which an element can differ from its value on the wire
  float seen;       // the most by which one did
  int32_t flagged;  // how many blocks had a NaN or Inf; all of such a block decodes to NaN
} shc_block_stats;

// The bytes of a wire part of `elements` elements, a multiple of 128.
SHC_API shc_status shc_wire_bytes(const shc_block_format* format, int64_t elements, int64_t* bytes);

// Writes all of a wire part of `wire_bytes` bytes, aligned to 128: the segments' elements, which
// are SHC_F32, SHC_BF16 or SHC_F16, and zeros where there is no segment. Segments must not overlap.
// `stats`, of the same device, may be NULL. `seed` is for SHC_STOCHASTIC. `threads` and `device`
// are as for shc_copy_bind.
SHC_API shc_status shc_encode(const shc_block_format* format, const shc_encoded_segment* segments,
                              size_t count, shc_dtype dtype, void* wire, int64_t wire_bytes,
                              uint64_t seed, shc_block_stats* stats, int threads, int device,
                              shc_stream* stream);
// Writes the segments' elements, rounded to `dtype`.
SHC_API shc_status shc_decode(const shc_block_format* format, const void* wire, int64_t wire_bytes,
                              const shc_decoded_segment* segments, size_t count, shc_dtype dtype,
                              int threads, int device, shc_stream* stream);
// Writes scale * the sum of `parts` wire parts of `count` elements each, one after another, or adds
// that to `dst`. It adds in float32, part 0 first. `options` NULL: SHC_COPY_OPTIONS_INIT.
SHC_API shc_status shc_decode_sum(const shc_block_format* format, const void* wires, int parts,
                                  void* dst, int64_t count, shc_dtype dtype,
                                  const shc_copy_options* options, int threads, int device,
                                  shc_stream* stream);

// ---- Communicators ----

typedef struct shc_comm shc_comm;

typedef enum shc_transport SHC_ENUM_BASE {
  SHC_SHM = 0,         // processes of one host
  SHC_LOCAL = 1,       // threads of one process, memory of the host
  SHC_LOCAL_CUDA = 2,  // threads of one process, memory of one CUDA device
  SHC_NCCL = 3         // a CUDA device each, on one or many hosts
} shc_transport;

// The name of a group, as bytes that may be sent anywhere.
typedef struct shc_unique_id {
  char bytes[512];
} shc_unique_id;

// Names a new group of `size` ranks. One process calls it, and lives until all ranks have
// connected; for SHC_LOCAL and SHC_LOCAL_CUDA that is the process of all ranks. Every group needs
// an id of its own.
SHC_API shc_status shc_get_unique_id(shc_transport transport, int size, shc_unique_id* id);

typedef struct shc_comm_options {
  size_t size;
  int version;
  int device;         // the CUDA device of SHC_NCCL and SHC_LOCAL_CUDA; others ignore it
  double deadline_s;  // the longest wait for another rank in a collective; 0: 300 seconds
  // Not 0: SHC_SUM and SHC_AVG of floats round the exact sum of all ranks, once, so that the order
  // of ranks does not matter. All ranks must give the same. SHC_SHM and SHC_LOCAL can do it; the
  // other transports refuse it.
  int64_t exact_sums;
} shc_comm_options;

#define SHC_COMM_OPTIONS_INIT {sizeof(shc_comm_options), SHC_VERSION, 0, 0, 0}

// Connects this rank. Collective: it returns when all `size` ranks have called it, at the latest
// when the deadline has passed. `options` NULL: SHC_COMM_OPTIONS_INIT.
SHC_API shc_status shc_comm_init_rank(shc_comm** comm, int size, const shc_unique_id* id, int rank,
                                      const shc_comm_options* options);

// What carries bytes between hosts for shc_comm_init_hosts: collectives of the ranks with one index
// on their hosts, such as MPI's. There are `hosts` of them; in these collectives a rank's number is
// that of its host, and so is `root`.
//
// A function returns 0 when this rank's part is complete, or anything else if it cannot be, and may
// then leave a sentence in `error`, which has room for 256 bytes. There are two channels, 0 and 1,
// each with an order of its own. The library calls from threads of its own, from one thread of each
// channel at once: MPI needs MPI_THREAD_MULTIPLE and a communicator for each channel.
typedef struct shc_across {
  size_t size;
  int version;
  void* context;  // each function gets it
  // recv + h * bytes, of `bytes` bytes: what host h sent.
  int (*all_gather)(void* context, int channel, const void* send, void* recv, size_t bytes,
                    char* error);
  // recv + h * bytes: what lay at send + own * bytes on host h, where own is this host.
  int (*all_to_all)(void* context, int channel, const void* send, void* recv, size_t bytes,
                    char* error);
  int (*broadcast)(void* context, int channel, void* buffer, size_t bytes, int root, char* error);
  // This rank leaves the group: it is called in peace, by shc_comm_close and shc_comm_destroy, as
  // well as after a failure, on any thread, and more than once. From then on the other hosts'
  // present and later calls with this rank are to fail, if you can make them. NULL: they end as
  // they do without.
  void (*leave)(void* context);
  // Called once, when nothing will be called any more; not in a forked child. NULL: nothing is.
  void (*destroy)(void* context);
} shc_across;

#define SHC_ACROSS_INIT {sizeof(shc_across), SHC_VERSION, NULL, NULL, NULL, NULL, NULL, NULL}

// Joins `hosts` hosts, of which this one has the number `host`, to a group in which this rank's
// number is host * size + rank of `on_host`. That is a communicator of SHC_SHM or SHC_LOCAL without
// exact sums, which has as many ranks on every host. From now on nothing but shc_comm_destroy is
// called with it, at any time; its deadline is the group's. Collective among all ranks, which
// compare their numbers.
//
// The group has shc_all_gather, shc_reduce_scatter, shc_all_reduce, shc_broadcast, shc_barrier and
// shc_allocate; each byte enters a host once. A wait for other hosts ends at the deadline, but
// shc_comm_destroy waits for functions of `across` that have not returned. If this function fails,
// `across` is destroyed, unless it is `across` that was refused.
SHC_API shc_status shc_comm_init_hosts(shc_comm** comm, shc_comm* on_host, const shc_across* across,
                                       int host, int hosts);

// The same over connected stream sockets, such as TCP's, two to the rank with this one's index on
// each other host h: sockets[h], whose other end is that rank's sockets[host], and
// sockets[hosts + h], whose other end is its sockets[hosts + host]. Those of this host are not
// looked at. The group closes them at its end. If this function fails, they are closed, unless it
// is with SHC_INVALID_ARGUMENT for `sockets`, `host` or `hosts`.
SHC_API shc_status shc_comm_init_hosts_over_sockets(shc_comm** comm, shc_comm* on_host,
                                                    const int* sockets, int host, int hosts);

// Leaves the group, once no collective, operation, memory or request refers to it any more. Destroy
// requests before, also those that have ended: until this rank leaves, the others wait for it.
SHC_API void shc_comm_destroy(shc_comm* comm);

SHC_API shc_status shc_comm_rank(const shc_comm* comm, int* rank);
SHC_API shc_status shc_comm_size(const shc_comm* comm, int* size);
// Makes every rank's present and later collectives fail with this reason. Any thread may call it.
// Unlike ncclCommAbort it destroys nothing: shc_comm_destroy follows, once no call is under way.
SHC_API shc_status shc_comm_abort(shc_comm* comm, const char* reason);
// Leaves the group now: ranks that wait for this one, or will, get SHC_COMM_ERROR.
SHC_API shc_status shc_comm_close(shc_comm* comm);
// SHC_COMM_ERROR if the group has failed or was closed; on a CUDA device only this call tells work
// that was aborted from work that was done.
SHC_API shc_status shc_comm_check(const shc_comm* comm);
// Gives a tag, 2^32 to 2^32 + 1023, a name, which sentences about calls then say. Every rank gives
// the same name, once.
SHC_API shc_status shc_comm_name_tag(shc_comm* comm, int64_t tag, const char* name);

// Which path the last collective of a kind took.
typedef struct shc_receipt {
  size_t size;
  int version;
  uint64_t sequence;   // the call's number in its channel
  char requested[32];  // the fastest path that the transport knows
  char taken[32];      // the path that the collective took
  char reason[256];    // why it was another one; "" if it was not
} shc_receipt;

#define SHC_RECEIPT_INIT {sizeof(shc_receipt), SHC_VERSION, 0, "", "", ""}

// `operation`: "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "all_to_all",
// "gather", "scatter" or "reduce". SHC_NOT_READY: there was none of this kind yet.
SHC_API shc_status shc_comm_receipt(const shc_comm* comm, const char* operation,
                                    shc_receipt* receipt);

// ---- Communication memory ----

typedef struct shc_memory shc_memory;

typedef enum shc_use SHC_ENUM_BASE {
  SHC_GATHER = 0,  // all ranks gather into it: one memory for all on shared memory
  SHC_REDUCE = 1   // this rank's contributions, which the other ranks can read
} shc_use;

// Collective. Zero-filled memory that the ranks reach without copies; `*data` is its address, a
// multiple of 128. It is valid until its `destroy`, also after the communicator has failed.
SHC_API shc_status shc_allocate(shc_comm* comm, size_t bytes, shc_use use, shc_memory** memory,
                                void** data);
SHC_API void shc_memory_destroy(shc_memory* memory);

// ---- Collectives ----

// Integers wrap on overflow, and their average is truncated; that of floats is the rounded sum
// times 1 / size. NaN and anything have NaN for their greatest and their least. The last three, of
// bits, are for integers alone. A CUDA device has the first four, for every dtype but SHC_I8. NCCL
// knows SHC_PROD, too, for every dtype but SHC_I8 and the 16-bit floats.
typedef enum shc_op SHC_ENUM_BASE {
  SHC_SUM = 0,
  SHC_AVG = 1,
  SHC_MAX = 2,
  SHC_MIN = 3,
  SHC_PROD = 4,
  SHC_BAND = 5,
  SHC_BOR = 6,
  SHC_BXOR = 7
} shc_op;

typedef struct shc_gather_options {
  size_t size;
  int version;
  int64_t tag;  // ranks that give different tags have called different collectives
  const int64_t*
      counts;  // each rank's elements where they differ, one number a rank; NULL: `count`
} shc_gather_options;

#define SHC_GATHER_OPTIONS_INIT {sizeof(shc_gather_options), SHC_VERSION, 0, NULL}

// In what partial sums cross between hosts, where a group has several (shc_comm_init_hosts): fewer
// bytes than the float32 in which they were taken. `send` is SHC_F32, SHC_BF16 or SHC_F16. All
// ranks give the same. This struct never changes.
typedef struct shc_coding {
  const shc_block_format* blocks;  // NULL: SHC_BF16, rounded to nearest even
  shc_block_stats* stats;          // grows with what coding costs, as in shc_encode; or NULL
} shc_coding;

typedef struct shc_reduce_options {
  size_t size;
  int version;
  int64_t tag;            // as for gathers
  const int64_t* counts;  // as for gathers
  float scale;            // recv = convert(scale * reduced); 0 is refused
  int accumulate;         // not 0: recv = convert(recv + scale * reduced)
  int32_t* nonfinite;  // on recv's device: is set to 1 if a written element is NaN or Inf; or NULL
  const shc_coding* coding;  // read before the call returns; NULL: sums cross as they are
} shc_reduce_options;

#define SHC_REDUCE_OPTIONS_INIT \
  {sizeof(shc_reduce_options), SHC_VERSION, 0, NULL, 1.0f, 0, NULL, NULL}

// Each collective runs on `stream`. Buffers begin at a multiple of their elements' size. With a
// NULL stream on a CPU it returns when this rank's part is done. With a stream it returns once it
// is queued; only what is wrong with the arguments is reported at once, and the rest by the events
// that are recorded afterwards. `options` may be NULL.

// `send` of rank r, `count` elements, goes to recv[r * count] and on, on every rank, converted to
// recv_dtype as in a copy plan. In place, `send` is recv + rank * count, of one dtype.
SHC_API shc_status shc_all_gather(shc_comm* comm, const void* send, shc_dtype send_dtype,
                                  void* recv, shc_dtype recv_dtype, int64_t count,
                                  const shc_gather_options* options, shc_stream* stream);
// `recv`, `count` elements, gets this rank's part of what all ranks' `send` (`size` parts) reduce
// to. 16-bit floats are summed in 32 bits, and rounded once. In place, `recv` is
// send + rank * count, of one dtype.
SHC_API shc_status shc_reduce_scatter(shc_comm* comm, const void* send, shc_dtype send_dtype,
                                      void* recv, shc_dtype recv_dtype, int64_t count, shc_op op,
                                      const shc_reduce_options* options, shc_stream* stream);
// In place, the same bits on every rank.
SHC_API shc_status shc_all_reduce(shc_comm* comm, void* buffer, shc_dtype dtype, int64_t count,
                                  shc_op op, int64_t tag, shc_stream* stream);
// `buffer` of `root`, `count` elements, goes to `buffer` of every rank. In memory for SHC_GATHER,
// which all ranks of a host share, it is one place for all of them, and the root's host has the
// value there as soon as the root writes it.
SHC_API shc_status shc_broadcast(shc_comm* comm, void* buffer, shc_dtype dtype, int64_t count,
                                 int root, shc_stream* stream);
SHC_API shc_status shc_barrier(shc_comm* comm, int64_t tag, shc_stream* stream);
// The next four are for all transports but SHC_NCCL. Their `recv`, and the `send` of all_to_all and
// reduce, may not lie in memory for SHC_GATHER, which all ranks share.
//
// The first send_counts[0] elements of `send` go to rank 0, the next send_counts[1] to rank 1, and
// so on; `recv`, which lies apart from it, gets recv_counts[0] elements of rank 0, then
// recv_counts[1] of rank 1. Both have a number for each rank, which may be 0, and are read before
// the call returns. Where a rank sends another number of elements than the receiver expects, all
// ranks get SHC_COMM_ERROR.
SHC_API shc_status shc_all_to_all(shc_comm* comm, const void* send, const int64_t* send_counts,
                                  void* recv, const int64_t* recv_counts, shc_dtype dtype,
                                  int64_t tag, shc_stream* stream);
// `send` of rank r, `count` elements, goes to recv[r * count] and on of `root`. Others' `recv` is
// ignored. In place, the root's `send` is recv + root * count.
SHC_API shc_status shc_gather(shc_comm* comm, const void* send, void* recv, shc_dtype dtype,
                              int64_t count, int root, int64_t tag, shc_stream* stream);
// `recv`, `count` elements, gets send[rank * count] and on of `root`. Others' `send` is ignored. In
// place, the root's `recv` is send + root * count.
SHC_API shc_status shc_scatter(shc_comm* comm, const void* send, void* recv, shc_dtype dtype,
                               int64_t count, int root, int64_t tag, shc_stream* stream);
// `recv` of `root`, `count` elements, gets the bits that shc_all_reduce would leave. Others' `recv`
// is ignored. In place, the root's `recv` is its `send`.
SHC_API shc_status shc_reduce(shc_comm* comm, const void* send, void* recv, shc_dtype dtype,
                              int64_t count, shc_op op, int root, int64_t tag, shc_stream* stream);

// ---- Persistent collectives: bound to their arguments once, and run as often as one likes ----

typedef struct shc_collective shc_collective;

// As the collectives above, whose arguments are checked here and never again. The buffers, and
// `nonfinite`, must be valid until the last run has ended. `options` is read here alone.
SHC_API shc_status shc_bind_all_gather(shc_comm* comm, const void* send, shc_dtype send_dtype,
                                       void* recv, shc_dtype recv_dtype, int64_t count,
                                       const shc_gather_options* options,
                                       shc_collective** collective);
SHC_API shc_status shc_bind_reduce_scatter(shc_comm* comm, const void* send, shc_dtype send_dtype,
                                           void* recv, shc_dtype recv_dtype, int64_t count,
                                           shc_op op, const shc_reduce_options* options,
                                           shc_collective** collective);
SHC_API shc_status shc_bind_all_reduce(shc_comm* comm, void* buffer, shc_dtype dtype, int64_t count,
                                       shc_op op, int64_t tag, shc_collective** collective);
SHC_API shc_status shc_bind_broadcast(shc_comm* comm, void* buffer, shc_dtype dtype, int64_t count,
                                      int root, shc_collective** collective);
SHC_API shc_status shc_bind_barrier(shc_comm* comm, int64_t tag, shc_collective** collective);
SHC_API shc_status shc_bind_all_to_all(shc_comm* comm, const void* send, const int64_t* send_counts,
                                       void* recv, const int64_t* recv_counts, shc_dtype dtype,
                                       int64_t tag, shc_collective** collective);
SHC_API shc_status shc_bind_gather(shc_comm* comm, const void* send, void* recv, shc_dtype dtype,
                                   int64_t count, int root, int64_t tag,
                                   shc_collective** collective);
SHC_API shc_status shc_bind_scatter(shc_comm* comm, const void* send, void* recv, shc_dtype dtype,
                                    int64_t count, int root, int64_t tag,
                                    shc_collective** collective);
SHC_API shc_status shc_bind_reduce(shc_comm* comm, const void* send, void* recv, shc_dtype dtype,
                                   int64_t count, shc_op op, int root, int64_t tag,
                                   shc_collective** collective);
// Runs it as the function of its name would.
SHC_API shc_status shc_start(const shc_collective* collective, shc_stream* stream);
SHC_API void shc_collective_destroy(shc_collective* collective);

// ---- Point to point ----

// Messages between two ranks of SHC_SHM or SHC_LOCAL; the other transports refuse them. A message
// has a source, a destination (which may be the same rank), a tag and bytes. A receive takes the
// first message of its source and tag that no earlier receive has taken: messages of one source and
// one tag arrive in the order sent. Any number of sends and receives may be under way, and they end
// in any order. Any thread may start, ask and wait, also while collectives run. A receive names the
// size of its message: a message of another size ends the group with SHC_COMM_ERROR on all ranks.
//
// A send has ended when its buffer may be written again. That does not say that the message was
// received, but it will be, also if this rank has closed its communicator since. Bytes move while
// threads of both ranks are in functions of this section. So a large message needs both ranks to
// wait, or to test from time to time; one thread that calls shc_wait_any serves all of a rank's.
typedef struct shc_request shc_request;

#define SHC_ANY_SOURCE (-1)

// Return when the send or the receive has ended, at the latest when the deadline has passed.
// `source` may be SHC_ANY_SOURCE; `sender`, if it is not NULL, becomes the rank that sent.
SHC_API shc_status shc_send(shc_comm* comm, const void* buffer, size_t bytes, int destination,
                            int64_t tag);
SHC_API shc_status shc_recv(shc_comm* comm, void* buffer, size_t bytes, int source, int64_t tag,
                            int* sender);

// Start a send or a receive, and never wait. The buffer must be valid until the request has ended
// or was destroyed.
SHC_API shc_status shc_isend(shc_comm* comm, const void* buffer, size_t bytes, int destination,
                             int64_t tag, shc_request** request);
SHC_API shc_status shc_irecv(shc_comm* comm, void* buffer, size_t bytes, int source, int64_t tag,
                             shc_request** request);
// SHC_OK: the request has ended well. SHC_NOT_READY: it has not ended. SHC_COMM_ERROR: it never
// will. It moves what can be moved, and never blocks.
SHC_API shc_status shc_request_test(shc_request* request);
// Waits for at most `timeout_s` seconds, and then returns SHC_NOT_READY, which harms nobody.
// Negative: until the deadline, which ends the group as in a collective.
SHC_API shc_status shc_request_wait(shc_request* request, double timeout_s);
// The rank that sent to a receive that has ended well; for a send the destination. SHC_NOT_READY:
// the receive is from any source, and has not ended.
SHC_API shc_status shc_request_source(const shc_request* request, int* source);
// If the request has not ended, this cancels it: the library does not touch the buffer any more.
// What the other rank sends to a cancelled receive that had taken its message is dropped; the other
// rank does not receive a cancelled send.
SHC_API void shc_request_destroy(shc_request* request);

// Waits until any request of this communicator ends, also one that another thread starts meanwhile,
// and writes it to `*request`. Each is told of once, unless shc_request_test or shc_request_wait
// has told of it, or it had ended before its start returned: test a request that you have started.
// SHC_NOT_READY: none has ended within `timeout_s` seconds (negative: it waits as long as the group
// lives, and has no deadline), or shc_wake_any was called. SHC_COMM_ERROR: the group has failed or
// was closed, and all that ended have been told of.
SHC_API shc_status shc_wait_any(shc_comm* comm, double timeout_s, shc_request** request);
// Ends one present or future shc_wait_any.
SHC_API shc_status shc_wake_any(shc_comm* comm);

// ---- Schedules: what is gathered, awaited, released and reduced in a step, and when ----

// A training framework fires triggers (a unit's forward begins, ends, ...), and does the actions
// that the schedule lists for each. Schedules are planned in Python, by `shardcomm.Schedule.plan`,
// and travel as the text of its `to_json()`; its docstring has the contract.
typedef struct shc_schedule shc_schedule;

typedef enum shc_phase SHC_ENUM_BASE {
  SHC_PRE_FORWARD = 0,
  SHC_POST_FORWARD = 1,
  SHC_PRE_BACKWARD = 2,
  SHC_POST_BACKWARD = 3,
  SHC_END_OF_BACKWARD = 4
} shc_phase;

typedef enum shc_verb SHC_ENUM_BASE {
  SHC_VERB_GATHER = 0,       // start to gather the unit's parameters into its slot
  SHC_VERB_WAIT_GATHER = 1,  // from here on they are used
  SHC_VERB_RELEASE = 2,      // the slot may be used for another unit
  SHC_VERB_REDUCE = 3,       // pack the unit's gradients, and start to reduce them
  SHC_VERB_ALL_REDUCE = 4,   // among the ranks that hold the same shard
  SHC_VERB_WAIT_REDUCE = 5   // from here on this rank's gradient is used
} shc_verb;

// This struct never changes.
typedef struct shc_action {
  shc_verb verb;
  int unit;
  int slot;  // of the unit's full parameters; -1 where the verb does not concern them
} shc_action;

// Reads what `shardcomm.Schedule.to_json()` has written.
SHC_API shc_status shc_schedule_parse(const char* json, shc_schedule** schedule);
SHC_API void shc_schedule_destroy(shc_schedule* schedule);
SHC_API shc_status shc_schedule_unit_count(const shc_schedule* schedule, size_t* count);
SHC_API shc_status shc_schedule_slot_count(const shc_schedule* schedule, size_t* count);
// The slot of a unit's full parameters, the same in every step.
SHC_API shc_status shc_schedule_slot_of(const shc_schedule* schedule, size_t unit, int* slot);
// The actions of a trigger, in the order of issue. `unit` is -1 for SHC_END_OF_BACKWARD. The
// pointer is valid until the schedule is destroyed.
SHC_API shc_status shc_schedule_actions(const shc_schedule* schedule, shc_phase phase, int unit,
                                        const shc_action** actions, size_t* count);

#ifdef __cplusplus
}
#endif

#endif  // SHARDCOMM_H_

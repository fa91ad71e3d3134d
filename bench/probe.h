// The limit of compare_gloo.py's C programs: the least that gives the same results through memory which ranks share.
// Nothing is checked or compared, nobody hears of an error, and the memory has room for all, twice, so that a call may
// fill one half while another rank still reads the other. Areas are filled by ordinary stores, or past the caches: which
// is faster depends on how far the ranks' cores are from each other, and the faster is the limit.
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>

static struct {
  int rank;
  int size;
  size_t area_bytes;  // of each rank, in each half
  char* areas;
  _Atomic long* came;  // a cache line for each rank
  long meetings;
  int half;
  int streams;  // whether areas are filled past the caches
} probe;

// Before the ranks are forked.
static void probe_make(int size, size_t most_bytes) {
  const size_t lines = (size_t)size * 64, bytes = lines + 2 * (size_t)size * most_bytes;
  char* memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) exit(4);
  probe.size = size;
  probe.area_bytes = most_bytes;
  probe.came = (_Atomic long*)memory;
  probe.areas = memory + lines;
}

// In each rank: its first access to a page costs more than the others.
static void probe_join(int rank) {
  const size_t bytes = 2 * (size_t)probe.size * probe.area_bytes;
  probe.rank = rank;
  for (size_t i = 0; i < bytes; i += 4096) (void)*(volatile char*)(probe.areas + i);
}

static void probe_meet(void) {
  const long meeting = ++probe.meetings;
  atomic_store(&probe.came[probe.rank * 8], meeting);
  for (int r = 0; r < probe.size; ++r) {
    for (long looks = 1; atomic_load(&probe.came[r * 8]) < meeting; ++looks) {
      if (looks % 1000 == 0) sched_yield();  // there may be more ranks than cores
    }
  }
}

static float* probe_area(int rank) {
  return (float*)(probe.areas + (size_t)(probe.half * probe.size + rank) * probe.area_bytes);
}

// memcpy. Up to 1 MiB by vectors, since glibc's may be far slower there: csrc/copy/copy_bytes.h.
__attribute__((optimize("no-tree-loop-distribute-patterns")))  // which would make it memcpy again
static void probe_copy(float* restrict to, const float* restrict from, int64_t bytes) {
  if (bytes > 1 << 20) {
    memcpy(to, from, (size_t)bytes);
    return;
  }
  for (int64_t i = 0; i < numel_of(bytes); ++i) to[i] = from[i];
}

// A copy into this rank's area, whose lines the others' cores have read.
static void probe_fill(float* restrict to, const float* restrict from, int64_t bytes) {
#if defined(__AVX2__)
  if (probe.streams && bytes % 32 == 0 && (uintptr_t)to % 32 == 0) {
    for (int64_t i = 0; i < numel_of(bytes); i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
    _mm_sfence();
    return;
  }
#endif
  probe_copy(to, from, bytes);
}

// out[i] = the sum of element `begin` + i of all areas, in the order of ranks.
static void probe_sum(float* restrict out, int64_t begin, int64_t count) {
  enum { kBlock = 4096 };
  for (int64_t done = 0; done < count; done += kBlock) {
    const int64_t n = count - done < kBlock ? count - done : kBlock;
    const float *restrict a = probe_area(0) + begin + done, *restrict b = probe_area(1) + begin + done;
    for (int64_t i = 0; i < n; ++i) out[done + i] = a[i] + b[i];
    for (int r = 2; r < probe.size; ++r) {
      const float* restrict more = probe_area(r) + begin + done;
      for (int64_t i = 0; i < n; ++i) out[done + i] += more[i];
    }
  }
}

// Each rank writes its part once, into memory of all. Before, all have read what it held.
static void probe_gather_window(const float* in, float* out, int64_t bytes) {
  const int64_t part = numel_of(bytes) / probe.size;
  probe_meet();
  probe_copy(out + probe.rank * part, in, bytes / probe.size);
  probe_meet();
}

static void probe_gather(const float* in, float* out, int64_t bytes) {
  const int64_t part = numel_of(bytes) / probe.size;
  probe.half = !probe.half;
  probe_fill(probe_area(probe.rank), in, bytes / probe.size);
  probe_meet();
  for (int r = 0; r < probe.size; ++r) {
    probe_copy(out + r * part, r == probe.rank ? in : probe_area(r), bytes / probe.size);
  }
}

// A copy in, and a sum in order.
static void probe_reduce_scatter(const float* in, float* out, int64_t bytes) {
  const int64_t part = numel_of(bytes) / probe.size;
  probe.half = !probe.half;
  probe_fill(probe_area(probe.rank), in, bytes);
  probe_meet();
  probe_sum(out, probe.rank * part, part);
}

// The same, and a copy of the others' sums.
static void probe_all_reduce(const float* in, float* out, int64_t bytes) {
  (void)in;
  const int64_t part = numel_of(bytes) / probe.size;
  probe.half = !probe.half;
  probe_fill(probe_area(probe.rank), out, bytes);
  probe_meet();
  probe_sum(out + probe.rank * part, probe.rank * part, part);
  probe_fill(probe_area(probe.rank) + probe.rank * part, out + probe.rank * part, bytes / probe.size);
  probe_meet();
  for (int r = 0; r < probe.size; ++r) {
    if (r != probe.rank) probe_copy(out + r * part, probe_area(r) + r * part, bytes / probe.size);
  }
}

static void probe_broadcast(const float* in, float* out, int64_t bytes) {
  (void)in;
  probe.half = !probe.half;
  if (probe.rank == 0) probe_fill(probe_area(0), out, bytes);
  probe_meet();
  if (probe.rank != 0) probe_copy(out, probe_area(0), bytes);
}

static void probe_barrier(const float* in, float* out, int64_t bytes) {
  (void)in, (void)out, (void)bytes;
  probe_meet();
}

#include "comm/executor.h"

#include "copy/convert_cpu.h"
#include "copy/copy_bytes.h"

namespace shardcomm {
namespace {

class HostExecutor final : public Executor {
 public:
  bool on_host() const override { return true; }
  void copy(void* dst, const void* src, std::size_t bytes, NativeStream) override {
    copy_bytes(dst, src, bytes);
  }
  void fill(Filler& filler, void* dst, const void* src, std::size_t bytes, NativeStream) override {
    filler.copy(dst, src, bytes);
  }
  void convert(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t count,
               NativeStream) override {
    convert_cpu(dst, dst_dtype, src, src_dtype, count);
  }
  void check_reduction(DType, RedOp) const override {}
  void reduce(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
              DType dtype, RedOp op, std::int64_t count, NativeStream) override {
    reduce_cpu(dst, epilogue, sources, num_sources, dtype, op, num_sources, count);
  }
  void before_meeting(int, std::uint64_t, NativeStream) override {}
  void after_meeting(int, std::uint64_t, NativeStream) override {}
  void finish() noexcept override {}
};

}  // namespace

std::unique_ptr<Executor> make_host_executor() { return std::make_unique<HostExecutor>(); }

}  // namespace shardcomm

// The largest sizes that the CUDA engine takes. They fix the size of the control block and nothing else.
#pragma once

namespace hybrid_ep {

constexpr int kMaxRanks = 72;          // one NVL72 domain
constexpr int kMaxDomains = 64;        // each with as many ranks
constexpr int kMaxMappedDomains = 32;  // where every peer's window is mapped, as on one host: a lane of a warp for each
constexpr int kMaxExperts = 2048;      // of all ranks together
constexpr int kMaxTopk = 32;           // one lane of a warp per expert of a token
constexpr int kMaxTokens = 65536;      // of one rank in one call
constexpr int kMaxCtas = 160;          // SMs of the largest supported GPU, rounded up
constexpr int kMaxRowBytes = 32768;
constexpr int kRowAlignBytes = 16;   // what the bulk copy engine moves
constexpr int kLineBytes = 128;      // of L2. A bulk store whose source or target begins within one takes more packets
constexpr int kRowsPerChunk = 4;     // rows of combine that share one arrival flag
constexpr int kMaxReportQueues = 8;  // of a CTA: warps that send chunks, each of which has a flag

// Limits of a copy of experts.
constexpr int kExpertChunkBytes = 16384;   // of one tensor, with one flag
constexpr int kMaxExpertTensors = 16;      // of one launch
constexpr int kMaxReplicas = 2048;         // ranks × spare slots
constexpr int kMaxChunksOfSource = 16384;  // that a source sends a rank in one launch, hence chunks that are staged

}  // namespace hybrid_ep

// Weights in blocks, as GGUF files store them: small unsigned qvalues with a scale, and perhaps a minimum, for each
// group of inputs. Nothing is rounded when they are packed.
//
// value = scale * (qvalue - zero) - minimum
//
// A weight consists of segments of rows, and each segment has one form. A segment consists of whole panels of 16 rows,
// and a panel of chunks of 256 inputs, in the order in which products read them. A chunk is padded to a multiple of 64
// bytes. Its parts, in order:
//
// - Planes of the qvalues of each 32 inputs, of 64 bytes each. 8-bit qvalues are eight lines [4 inputs][16 rows], each
//   a plane. Otherwise, byte i of a low plane holds the low four bits of byte i of two lines, the first line's in the
//   low half. With 5 bits, a high plane before the four low planes holds the fifth bits of all eight lines, the first
//   line's in the lowest bit. With 6 bits, a high plane before each two low planes holds the fifth and sixth bits of
//   their four lines, the first line's in the lowest two bits. So planes are read in ascending order.
// - A record for each group: 16 scales, then 16 minima; int8 and uint8 if the form has units, otherwise float16.
// - If the form has units: 16 float16 units that multiply scales, then 16 that multiply minima.
#pragma once

#include "kernels.h"

namespace llm {

constexpr size_t kBlockInputs = 32;   // inputs whose planes lie together
constexpr size_t kChunkInputs = 256;  // inputs with one unit
constexpr size_t kChunkBlocks = kChunkInputs / kBlockInputs;
constexpr size_t kLineBytes = 64;
// Most bits of a qvalue of a form with minima.
constexpr size_t kMostBitsWithMinima = 5;
// Most inputs: indices of this many fit everywhere.
constexpr size_t kMaxBlockInputs = 1 << 20;

// The planes of the low and the high bits of a line, for qvalues of 4, 5 or 6 bits. A block has eight lines.
constexpr size_t lines_of_high_plane(size_t bits) { return 8 / (bits - 4); }
constexpr size_t high_plane(size_t bits, size_t line) { return line / lines_of_high_plane(bits) * 3; }
constexpr size_t low_plane(size_t bits, size_t line) {
  return line / 2 + (bits == 4 ? 0 : 1 + line / lines_of_high_plane(bits));
}

// Sizes of the parts of a panel, in bytes.
struct BlockLayout {
  size_t plane_bytes;   // of the planes of 32 inputs
  size_t number_bytes;  // of a scale or minimum
  size_t record_bytes;  // of the scales and minima of a group
  size_t unit_bytes;    // of the units of a chunk
  size_t block_groups;  // groups of 32 inputs
  size_t chunk_bytes;   // of a whole chunk

  LLM_INLINE explicit BlockLayout(const BlockForm& form) {
    plane_bytes = kLineBytes * form.bits;
    number_bytes = form.has_units ? 1 : 2;
    record_bytes = kPanelWidth * number_bytes * (form.has_minima ? 2 : 1);
    unit_bytes = form.has_units ? kPanelWidth * 2 * (form.has_minima ? 2 : 1) : 0;
    block_groups = kBlockInputs / form.group;
    chunk_bytes = bytes_of(kChunkBlocks);
  }

  // Bytes of a chunk of this number of blocks; only the last chunk of a panel may have fewer than eight.
  LLM_INLINE size_t bytes_of(size_t blocks) const {
    return TiledLayout::padded(blocks * (plane_bytes + block_groups * record_bytes) + unit_bytes, kLineBytes);
  }

  // The lines of a chunk that each of its blocks prefetches, rounded up.
  LLM_INLINE size_t lines_of_block() const { return (chunk_bytes / kLineBytes + kChunkBlocks - 1) / kChunkBlocks; }

  LLM_INLINE size_t panel_bytes(size_t k) const {
    const size_t blocks = (k + kBlockInputs - 1) / kBlockInputs, rest = blocks % kChunkBlocks;
    return blocks / kChunkBlocks * chunk_bytes + (rest > 0 ? bytes_of(rest) : 0);
  }
};

// A chunk of a panel.
struct BlockChunk {
  size_t blocks;
  const uint8_t* planes;
  const uint8_t* records;
  const uint8_t* units;

  LLM_INLINE BlockChunk(const BlockLayout& layout, const uint8_t* panel, size_t k, size_t index) {
    const size_t left = k / kBlockInputs - index * kChunkBlocks;
    blocks = left < kChunkBlocks ? left : kChunkBlocks;
    planes = panel + index * layout.chunk_bytes;
    records = planes + blocks * layout.plane_bytes;
    units = records + blocks * layout.block_groups * layout.record_bytes;
  }
};

// Row-major rows [n, k] of one form. Arrays without minima or units are null.
struct BlockRows {
  BlockForm form;
  const uint8_t* qvalues;        // [n, k]
  const void* scales;            // [n, groups]
  const void* minima;            // [n, groups]
  const uint16_t* units;         // [n, k / 256]
  const uint16_t* minima_units;  // [n, k / 256]
  size_t n, k;
};

// Whether products support rows of this form and size.
bool can_pack(const BlockRows& rows);
// Size of the packed rows in bytes.
size_t packed_bytes(const BlockRows& rows);
void pack_blocks(const BlockRows& rows, void* target);
// Reads one row of a packed weight as k numbers.
void decode_block_row(const WeightQValues& qvalues, const void* packed, size_t k, size_t row, float* target);

}  // namespace llm

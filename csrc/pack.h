// From the blocks of a GGUF file to packed tiles. Lossless: the dequantised weights are identical.
#pragma once
#include <string>
#include <vector>

#include "layout.h"

namespace forerun {

enum class SourceFormat { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL };

// Parses a format's name; throws std::invalid_argument for another.
SourceFormat source_format(const std::string& name);
std::vector<std::string> source_format_names();
// The format tiles of it are packed in.
Format packed_format(SourceFormat source);
// Bytes of one source row of `inputs` values; throws std::invalid_argument unless whole blocks fit.
size_t source_row_bytes(SourceFormat source, int inputs);

// The shape of a packed matrix, data left null.
PackedMatrix packed_shape(Format format, int outputs, int inputs);

// Fills tiles [tile_begin, tile_end). Output row n is source row rows[n], or n when rows is null.
// Returns false when a Q4_0 scale is too large to store its minimum, -8 d, as fp16 (|d| > 8188).
bool pack_tiles(PackedMatrix& out, int tile_begin, int tile_end, SourceFormat source, const uint8_t* data,
                const int32_t* rows);

}  // namespace forerun

// The checksum of one block (checksum.h).

std::uint64_t checksum_block(const char* data, std::int64_t bytes) {
    BlockSum block;
    block.begin();
    block.add(data, bytes, [](std::int64_t) {});
    return block.sum();
}

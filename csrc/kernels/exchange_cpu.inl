// What is stored is h rounded to float32, so that is what the sum must see: it follows the rows exactly.
void exchange(const double* acc, double* out, const Sent* sent, const RowSwap* rows, std::int64_t k, std::int64_t begin,
              std::int64_t end, double* squares) {
    fold_tiles(acc, out, sent, k, begin, end, squares,
               [&](std::int64_t i, const float* next, std::int64_t tile, std::int64_t count, double* sum) {
                   if (rows[i].old_row == nullptr)  // nor anything that it referred to
                       return fold_row<double, false, false, true>(sent[i], rows + i, next, tile, count, sum);
                   if (rows[i].anchor == nullptr)
                       return fold_row<double, true, false, true>(sent[i], rows + i, next, tile, count, sum);
                   return fold_row<double, true, true, true>(sent[i], rows + i, next, tile, count, sum);
               });
}

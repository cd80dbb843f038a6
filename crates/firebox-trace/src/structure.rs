//! The structural hash: whether two traces are the same program on the same shapes. The planner
//! looks footprints up by it, so a known structure is not analysed again.

use std::hash::{Hash, Hasher};

use burn_ir::{BaseOperationIr, OperationIr, TensorIr};
use burn_std::Slice;
use serde::{Deserialize, Serialize};

use crate::{Description, Step, TensorInfo, Trace};

/// The coarsest alignment of a buffer on any target, as a power of two: 512 bytes.
const ALIGNMENT: u32 = 9;

/// The structural hash of a trace.
///
/// Two hashes are equal for the same calls on the same shapes and element types, in the same order,
/// with the same lifetimes. These do not count: the values of tensors and scalars, the order of
/// tensors that are freed between two calls, and which existing tensors loader threads requested.
/// The start and end of a slice count only by the powers of two that divide them: on some targets a
/// slice with aligned ends is a view, and any other slice is a new buffer.
///
/// Two steps of the same model on micro-batches of the same size have the same hash even if their
/// learning rates differ. Another size, another branch or another module has another hash. The hash
/// is stable within one build of firebox. It is not cryptographic: it resists chance, not malice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StructuralHash(u64);

impl std::fmt::Display for StructuralHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Trace {
    /// The structural hash of the trace.
    pub fn structural_hash(&self) -> StructuralHash {
        let hasher = &mut StructureHasher::default();
        let descriptions: Vec<u64> = self.descriptions.iter().map(|it| structure_of(it)).collect();
        // The sum over tensors that are freed one after the other. burn keeps gradients in hash
        // maps and frees them in any order.
        let mut freed = 0_u64;
        for step in &self.steps {
            if let Step::Free(tensor) = step {
                let mut one = StructureHasher::default();
                one.mix(u64::from(tensor.0) + 1);
                freed = freed.wrapping_add(one.0);
                continue;
            }
            hasher.free(&mut freed);
            match step {
                Step::Call(call) => {
                    hasher.write_usize(1);
                    hasher.write(call.name.as_bytes());
                    for input in &call.inputs {
                        hasher.write_u32(input.tensor.0);
                        hasher.write_u8(input.last.into());
                    }
                    for output in &call.outputs {
                        hasher.write_u32(output.0);
                        hasher.tensor(self.tensor(*output));
                    }
                    hasher.mix(descriptions[call.description.0 as usize]);
                }
                Step::Upload { output, .. } => {
                    hasher.write_usize(2);
                    hasher.tensor(self.tensor(*output));
                }
                Step::Read(read) => {
                    hasher.write_usize(4);
                    hasher.write_u32(read.tensor.0);
                }
                Step::Free(_) | Step::Mark(_) => {}
            }
        }
        hasher.free(&mut freed);
        for existing in self.existing() {
            hasher.write_u32(existing.0);
            hasher.tensor(self.tensor(existing));
        }
        StructuralHash(hasher.0)
    }
}

/// The hash of a description: its operations, and which of their results are the call's.
fn structure_of(description: &Description) -> u64 {
    let mut hasher = StructureHasher::default();
    for operation in &description.operations {
        use BaseOperationIr::{Slice, SliceAssign};
        use OperationIr::{BaseBool, BaseFloat, BaseInt};
        match operation {
            BaseBool(Slice(slice)) | BaseFloat(Slice(slice)) | BaseInt(Slice(slice)) => {
                hasher.mix(5);
                slice.out.hash(&mut hasher);
                hasher.ranges(&slice.tensor, &slice.ranges);
            }
            BaseBool(SliceAssign(slice))
            | BaseFloat(SliceAssign(slice))
            | BaseInt(SliceAssign(slice)) => {
                hasher.mix(6);
                slice.value.hash(&mut hasher);
                hasher.ranges(&slice.tensor, &slice.ranges);
            }
            other => other.hash(&mut hasher),
        }
    }
    description.outputs.iter().for_each(|output| hasher.mix(*output));
    if let Some(workspace) = description.workspace {
        hasher.mix(workspace.get());
    }
    hasher.0
}

/// The alignment of an offset in bytes, as a power of two. An offset of zero ranks higher than any:
/// a view from the start of its buffer is written in place.
fn alignment(offset: isize) -> u64 {
    let none = u64::from(ALIGNMENT) + 1;
    if offset == 0 { none } else { offset.trailing_zeros().min(ALIGNMENT).into() }
}

/// A hasher that skips 64-bit words, after FxHash (Firefox, rustc).
///
/// In burn's intermediate representation a 64-bit word is a tensor id or the value of a scalar.
/// Dimensions, strides and axes are `usize`, variants are `isize`. Which tensor an operation takes
/// is hashed from [`crate::Call`] instead.
#[derive(Default)]
struct StructureHasher(u64);

impl StructureHasher {
    fn mix(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x51_7c_c1_b7_27_22_0a_95);
    }

    /// Hashes the shape and the element type.
    fn tensor(&mut self, tensor: &TensorInfo) {
        tensor.shape.hash(self);
        tensor.dtype.hash(self);
    }

    /// Hashes what distinguishes ranges of a tensor whose lengths are known: the alignment of each
    /// end, and the alignment of all ends together in a contiguous tensor. (In a tensor that is not
    /// contiguous, the ends of several dimensions may add up to a number with a higher alignment.)
    fn ranges(&mut self, tensor: &TensorIr, ranges: &[Slice]) {
        tensor.hash(self);
        let mut ends = [0; 2];
        let strides = tensor.shape.iter().rev().scan(tensor.dtype.size(), |stride, size| {
            let this = *stride;
            *stride *= size;
            Some(this)
        });
        let strides: Vec<usize> = strides.collect();
        let dimensions = tensor.shape.iter().zip(strides.iter().rev());
        for (range, (size, stride)) in ranges.iter().zip(dimensions) {
            let from_start = |end: isize| if end < 0 { end + *size as isize } else { end };
            let start = from_start(range.start);
            let rest = *size as isize - range.end.map_or(*size as isize, from_start);
            for (sum, end) in ends.iter_mut().zip([start, rest]) {
                let bytes = end * tensor.dtype.size() as isize;
                self.mix(alignment(bytes));
                *sum += end * *stride as isize;
            }
            self.write_isize(range.step);
        }
        ends.iter().for_each(|sum| self.mix(alignment(*sum)));
    }

    /// Hashes the sum over the tensors that were freed since the latest other step, if there were
    /// any.
    fn free(&mut self, sum: &mut u64) {
        match std::mem::take(sum) {
            0 => {}
            sum => {
                self.mix(3);
                self.mix(sum);
            }
        }
    }
}

impl Hasher for StructureHasher {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.mix(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, word: u8) {
        self.mix(word.into());
    }

    fn write_u32(&mut self, word: u32) {
        self.mix(word.into());
    }

    fn write_u64(&mut self, _scalar_or_id: u64) {}

    fn write_usize(&mut self, word: usize) {
        self.mix(word as u64);
    }

    fn finish(&self) -> u64 {
        unreachable!("the words are asked")
    }
}

//! The buffers of a pool: CubeCL's memory handles, and their numbers, by which they are looked up.
//!
//! CubeCL numbers every buffer but exposes the number only in its `Debug` text. The full text is
//! never built: writing stops at the number, which is the first piece that consists of digits.

use std::fmt::{self, Debug, Write};

use cubecl_runtime::memory_management::ManagedMemoryHandle;

use crate::pool::Holder;

/// The only clone of a buffer's handle that a pool keeps. CubeCL counts clones, and a second one
/// would disable in-place operations.
pub(crate) struct Buffer(ManagedMemoryHandle);

impl Buffer {
    pub(crate) fn new(memory: ManagedMemoryHandle) -> Self {
        Self(memory)
    }

    pub(crate) fn number(&self) -> u64 {
        number_of(&self.0)
    }
}

impl Holder for Buffer {
    fn is_free(&self) -> bool {
        self.0.is_free()
    }
}

struct Number(Option<u64>);

impl Write for Number {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Ok(());
        }
        self.0 = text.parse().ok();
        // The rest of the text is not needed.
        Err(fmt::Error)
    }
}

/// The number of a handle or its binding.
///
/// # Panics
///
/// If the debug text has no number, as in an incompatible version of CubeCL.
pub(crate) fn number_of(memory: &impl Debug) -> u64 {
    let mut number = Number(None);
    // The writer returns an error as soon as the number is known.
    let _ = write!(number, "{memory:?}");
    number.0.expect("CubeCL writes the number of a buffer into its debug text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_and_their_bindings_have_one_number() {
        let (one, other) = (ManagedMemoryHandle::new(), ManagedMemoryHandle::new());
        assert_eq!(number_of(&one), number_of(&one.clone().binding()));
        assert_ne!(number_of(&one), number_of(&other));
        assert_eq!(number_of(&other), number_of(&other.clone()));
    }
}

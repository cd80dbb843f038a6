//! The numbers of CubeCL's memory handles.
//!
//! CubeCL numbers every buffer and keeps the number to itself, but for its `Debug` text. That text is not built: writing ends at
//! the number, which is its first piece of digits.

use std::fmt::{self, Debug, Write};

struct Number(Option<u64>);

impl Write for Number {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Ok(());
        }
        self.0 = text.parse().ok();
        // Nothing behind it is asked for.
        Err(fmt::Error)
    }
}

/// The number of a handle or of its binding.
///
/// # Panics
///
/// If its text has none: this is another version of CubeCL.
pub(crate) fn number_of(memory: &impl Debug) -> u64 {
    let mut number = Number(None);
    // Ended by an error as soon as the number is known.
    let _ = write!(number, "{memory:?}");
    number.0.expect("CubeCL writes the number of a buffer into its debug text")
}

#[cfg(test)]
mod tests {
    use cubecl_runtime::memory_management::ManagedMemoryHandle;

    use super::*;

    #[test]
    fn handles_and_their_bindings_have_one_number() {
        let (one, other) = (ManagedMemoryHandle::new(), ManagedMemoryHandle::new());
        assert_eq!(number_of(&one), number_of(&one.clone().binding()));
        assert_ne!(number_of(&one), number_of(&other));
        assert_eq!(number_of(&other), number_of(&other.clone()));
    }
}

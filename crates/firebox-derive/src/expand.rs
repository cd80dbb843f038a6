//! Turns a checked struct into the impl: one line for each field in `items` and `range`, and bounds
//! for each field whose type is open.

use std::collections::HashSet;

use proc_macro2::{Group, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::ext::IdentExt;
use syn::{
    Data, DataStruct, DeriveInput, Error, ExprPath, Field, Generics, Index, Member, Path, Type,
    TypeParam, WherePredicate, parse_quote,
};

use crate::attributes::{Errors, FieldOptions, StructOptions};

/// A field, and how it is cut.
struct Part<'a> {
    field: &'a Field,
    member: Member,
    options: FieldOptions,
}

/// The impl of `MicroBatch` for `input`. `home` is the crate that holds the trait.
///
/// # Errors
/// `input` is not a struct with fields, or its attributes are wrong. All wrong attributes are
/// reported together.
pub fn expand(input: &DeriveInput, home: &Path) -> syn::Result<TokenStream> {
    let data = require_struct(input)?;
    let mut errors = Errors::default();
    let options = StructOptions::read(&input.attrs, &mut errors);
    let parts = parts(data, &mut errors);
    if let Err(error) = require_items(input, &parts) {
        errors.push(error);
    }
    errors.finish()?;

    let mut generics = input.generics.clone();
    let bounds = bounds(&parts, &input.generics, home);
    generics.make_where_clause().predicates.extend(bounds);
    let (impl_generics, type_generics, where_clause) = generics.split_for_impl();
    let name = &input.ident;
    let owner = name.unraw().to_string();
    let items = items(&owner, &parts, home);
    let range = range(&parts, home);
    let weight = match options.weight {
        Some(path) => weight(&path),
        None => weight_of_a_field(&owner, &parts, home),
    };
    Ok(quote! {
        #[automatically_derived]
        impl #impl_generics #home::MicroBatch for #name #type_generics #where_clause {
            #items
            #range
            #weight
        }
    })
}

fn require_struct(input: &DeriveInput) -> syn::Result<&DataStruct> {
    let by_hand = "implement `MicroBatch` by hand, it takes two methods";
    match &input.data {
        Data::Struct(data) if data.fields.is_empty() => Err(Error::new_spanned(
            &input.ident,
            format!(
                "`{}` has no fields, so nothing counts items: add a tensor or a `Vec` with one entry per item",
                input.ident
            ),
        )),
        Data::Struct(data) => Ok(data),
        Data::Enum(data) => Err(Error::new(
            data.enum_token.span,
            format!("`MicroBatch` is derived for structs, not for enums: {by_hand}"),
        )),
        Data::Union(data) => Err(Error::new(
            data.union_token.span,
            format!("`MicroBatch` is derived for structs, not for unions: {by_hand}"),
        )),
    }
}

fn parts<'a>(data: &'a DataStruct, errors: &mut Errors) -> Vec<Part<'a>> {
    let fields = data.fields.iter().enumerate();
    fields
        .map(|(index, field)| Part {
            field,
            member: match &field.ident {
                Some(name) => Member::Named(name.clone()),
                None => Member::Unnamed(Index::from(index)),
            },
            options: FieldOptions::read(&field.attrs, errors),
        })
        .collect()
}

fn require_items(input: &DeriveInput, parts: &[Part]) -> syn::Result<()> {
    if parts.iter().any(|part| !part.options.shared) {
        return Ok(());
    }
    Err(Error::new_spanned(
        &input.ident,
        format!(
            "every field of `{0}` is shared, so nothing counts items: unmark one, or, if `{0}` is part of a \
             batch, do not derive `MicroBatch` and mark the field that holds it `#[micro_batch(shared)]`",
            input.ident
        ),
    ))
}

/// Bounds on the field types that the struct's own bounds leave open.
fn bounds(parts: &[Part], generics: &Generics, home: &Path) -> Vec<WherePredicate> {
    let open = open_parameters(generics);
    parts.iter().flat_map(|part| part.bounds(generics, &open, home)).collect()
}

/// The type parameters without any bound, inline or in the where clause.
fn open_parameters(generics: &Generics) -> HashSet<String> {
    let clauses = || generics.where_clause.iter().flat_map(|clause| &clause.predicates);
    let bound_below = |parameter: &TypeParam| {
        clauses().any(|predicate| match predicate {
            WherePredicate::Type(predicate) => is_parameter(&predicate.bounded_ty, parameter),
            _ => false,
        })
    };
    generics
        .type_params()
        .filter(|parameter| parameter.bounds.is_empty() && !bound_below(parameter))
        .map(|parameter| parameter.ident.to_string())
        .collect()
}

fn is_parameter(ty: &Type, parameter: &TypeParam) -> bool {
    matches!(ty, Type::Path(path) if path.qself.is_none() && path.path.is_ident(&parameter.ident))
}

/// Whether one of `names` occurs in `tokens`.
fn mentions(tokens: TokenStream, names: &HashSet<String>) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => names.contains(&ident.to_string()),
        TokenTree::Group(group) => mentions(group.stream(), names),
        TokenTree::Punct(_) | TokenTree::Literal(_) => false,
    })
}

fn items(owner: &str, parts: &[Part], home: &Path) -> TokenStream {
    let counted = parts.iter().filter(|part| !part.options.shared);
    let lines = counted.map(|part| {
        let (name, made) = (part.name(), part.make(home));
        quote!(let tally = #made.tally(tally, #name)?;)
    });
    quote! {
        fn items(
            &self,
        ) -> ::core::result::Result<::core::primitive::usize, #home::__derive::MicroBatchError> {
            let tally = #home::__derive::Tally::new(#owner);
            #(#lines)*
            tally.items()
        }
    }
}

fn range(parts: &[Part], home: &Path) -> TokenStream {
    let lines = parts.iter().map(|part| {
        let (member, made) = (&part.member, part.make(home));
        let cut = (!part.options.shared).then(|| quote!(.range(&range)));
        quote!(#member: #made #cut,)
    });
    quote! {
        fn range(&self, range: ::core::ops::Range<::core::primitive::usize>) -> Self {
            Self { #(#lines)* }
        }
    }
}

fn weight(path: &ExprPath) -> TokenStream {
    // Assigns to a function pointer, so the compiler error for a wrong signature shows the right
    // one.
    let function = placed_on(quote!(let weight: fn(&Self) -> ::core::primitive::f64 =), path);
    quote! {
        fn weight(&self) -> ::core::primitive::f64 {
            #function #path;
            weight(self)
        }
    }
}

/// The weight of the field that has one.
fn weight_of_a_field(owner: &str, parts: &[Part], home: &Path) -> TokenStream {
    let cut = parts.iter().filter(|part| !part.options.shared);
    let made = cut.map(|part| part.make(home));
    quote! {
        fn weight(&self) -> ::core::primitive::f64 {
            let weights = [#(#made.weight()),*];
            #home::__derive::of_fields(self, #owner, &weights)
        }
    }
}

/// The same tokens with the source position of `target`, from its first token to its last.
///
/// Name resolution does not change, even if a user's macro wrote `target`.
fn placed_on(tokens: TokenStream, target: &impl ToTokens) -> TokenStream {
    let targets: Vec<TokenTree> = target.to_token_stream().into_iter().collect();
    let (Some(first), Some(last)) = (targets.first(), targets.last()) else {
        return tokens;
    };
    let mut start = Some(first.span());
    let place = |token: TokenTree| {
        let mut placed = match token {
            TokenTree::Group(group) => {
                TokenTree::from(Group::new(group.delimiter(), placed_on(group.stream(), target)))
            }
            token => token,
        };
        let place = start.take().unwrap_or(last.span());
        placed.set_span(placed.span().located_at(place));
        placed
    };
    tokens.into_iter().map(place).collect()
}

impl Part<'_> {
    /// The bounds the field's type needs to be cut this way, if the struct leaves the type open: it
    /// is a type parameter, or mentions one of the `open` ones.
    fn bounds(
        &self,
        generics: &Generics,
        open: &HashSet<String>,
        home: &Path,
    ) -> Vec<WherePredicate> {
        let ty = &self.field.ty;
        let bare = generics.type_params().any(|parameter| is_parameter(ty, parameter));
        if !bare && !mentions(ty.to_token_stream(), open) {
            return Vec::new();
        }
        let FieldOptions { dim, each, shared } = &self.options;
        if *shared {
            return vec![parse_quote!(#ty: ::core::clone::Clone)];
        }
        let cut: Path = match dim {
            Some(_) => parse_quote!(#home::__derive::SliceDim),
            None => parse_quote!(#home::MicroBatch),
        };
        if !*each {
            return vec![parse_quote!(#ty: #cut)];
        }
        let elements: Path = parse_quote!(#home::__derive::Elements);
        vec![parse_quote!(#ty: #elements), parse_quote!(<#ty as #elements>::Element: #cut)]
    }

    /// The field's name in messages.
    fn name(&self) -> String {
        match &self.member {
            Member::Named(name) => name.unraw().to_string(),
            Member::Unnamed(index) => index.index.to_string(),
        }
    }

    /// The call that requires the trait from the field's type, at the source position of the type.
    ///
    /// `items` and `range` make the same call at the same position, so the compiler shows its error
    /// only once.
    fn make(&self, home: &Path) -> TokenStream {
        let member = &self.member;
        let FieldOptions { dim, each, shared } = &self.options;
        let call = if *shared {
            quote!(::core::clone::Clone::clone(&self.#member))
        } else {
            match (each, dim) {
                (false, None) => quote!(#home::__derive::field(&self.#member)),
                (false, Some(dim)) => quote!(#home::__derive::along(&self.#member, #dim)),
                (true, None) => quote!(#home::__derive::each(&self.#member)),
                (true, Some(dim)) => quote!(#home::__derive::each_along(&self.#member, #dim)),
            }
        };
        placed_on(call, &self.field.ty)
    }
}
